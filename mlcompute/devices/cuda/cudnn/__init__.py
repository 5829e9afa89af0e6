"""cuDNN 9, NVIDIA's library of convolutions and attention, through the C interface of its graph API.

`ConvolutionProblem` and `AttentionProblem` say in plain numbers what is to be computed; a `Plan` is that with an engine
chosen once; its `enqueue` is all that happens at run time.
"""

from mlcompute.devices.cuda.cudnn.attention import AttentionPlan, AttentionProblem, find_attention_plan
from mlcompute.devices.cuda.cudnn.convolution import ConvolutionPlan, find_plan
from mlcompute.devices.cuda.cudnn.library import Cudnn, require
from mlcompute.devices.cuda.cudnn.problem import ConvolutionProblem, Direction, problem_of

__all__ = [
    "AttentionPlan",
    "AttentionProblem",
    "ConvolutionPlan",
    "ConvolutionProblem",
    "Cudnn",
    "Direction",
    "find_attention_plan",
    "find_plan",
    "problem_of",
    "require",
]
