"""The closed table of ops every device must know, as functions on symbolic values.

A file per family: views, elementwise, reductions, indexing, matmul and convolution, pooling, recurrent, attention,
cross entropy, ordering, group. `TABLE` holds all.
"""

from mlcompute.ops.attention import *
from mlcompute.ops.cross_entropy import *
from mlcompute.ops.ctc import *
from mlcompute.ops.division import *
from mlcompute.ops.elementwise import *
from mlcompute.ops.embedding import *
from mlcompute.ops.group import *
from mlcompute.ops.group_normalization import *
from mlcompute.ops.indexing import *
from mlcompute.ops.matmul_and_convolution import *
from mlcompute.ops.op import *
from mlcompute.ops.ordering import *
from mlcompute.ops.pooling import *
from mlcompute.ops.recurrent import *
from mlcompute.ops.reductions import *
from mlcompute.ops.rnn import *
from mlcompute.ops.state import *
from mlcompute.ops.views import *
