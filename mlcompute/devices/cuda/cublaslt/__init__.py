"""cuBLASLt, NVIDIA's matmul library, through its C interface.

`problem_of` says in plain numbers how cuBLASLt has to read the operands of a matmul; `Matmul` is that with descriptors
and an algorithm, made once; `Matmul.enqueue` is all that happens at run time.
"""

from mlcompute.devices.cuda.cublaslt.layout import Matrix, Problem, problem_of
from mlcompute.devices.cuda.cublaslt.library import CublasLt, require
from mlcompute.devices.cuda.cublaslt.matmul import Matmul, NoAlgorithmError

__all__ = ["CublasLt", "Matmul", "Matrix", "NoAlgorithmError", "Problem", "problem_of", "require"]
