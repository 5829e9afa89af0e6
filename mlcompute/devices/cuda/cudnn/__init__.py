"""cuDNN 9, NVIDIA's library of convolutions, attention and recurrent layers, through its C interface.

`ConvolutionProblem`, `AttentionProblem` and `RecurrentProblem` say in plain numbers what is to be computed; a plan is
that with everything chosen once; enqueueing it is all that happens at run time. Its graph API has no recurrent layers.
"""

from mlcompute.devices.cuda.cudnn.attention import AttentionPlan, AttentionProblem, find_attention_plan
from mlcompute.devices.cuda.cudnn.convolution import ConvolutionPlan, find_plan
from mlcompute.devices.cuda.cudnn.library import Cudnn, require
from mlcompute.devices.cuda.cudnn.problem import ConvolutionProblem, Direction, problem_of
from mlcompute.devices.cuda.cudnn.recurrent import RecurrentPlan, RecurrentProblem, find_recurrent_plan

__all__ = [
    "AttentionPlan",
    "AttentionProblem",
    "ConvolutionPlan",
    "ConvolutionProblem",
    "Cudnn",
    "Direction",
    "RecurrentPlan",
    "RecurrentProblem",
    "find_attention_plan",
    "find_plan",
    "find_recurrent_plan",
    "problem_of",
    "require",
]
