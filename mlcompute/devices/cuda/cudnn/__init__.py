"""cuDNN 9, NVIDIA's library of convolutions, through the C interface of its graph API.

`ConvolutionProblem` says in plain numbers what is to be computed; `ConvolutionPlan` is that with an engine chosen once;
`ConvolutionPlan.enqueue` is all that happens at run time.
"""

from mlcompute.devices.cuda.cudnn.convolution import ConvolutionPlan, find_plan
from mlcompute.devices.cuda.cudnn.library import Cudnn, require
from mlcompute.devices.cuda.cudnn.problem import ConvolutionProblem, Direction, problem_of

__all__ = ["ConvolutionPlan", "ConvolutionProblem", "Cudnn", "Direction", "find_plan", "problem_of", "require"]
