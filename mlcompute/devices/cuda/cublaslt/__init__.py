"""cuBLASLt, NVIDIA's matmul library, through its C interface.

`problem_of` says in plain numbers how cuBLASLt has to read the operands of a matmul; `Product` is that with descriptors
and an algorithm, made once; `Product.enqueue` is all that happens at run time.
"""

from mlcompute.devices.cuda.cublaslt.layout import Matrix, Problem, problem_of
from mlcompute.devices.cuda.cublaslt.library import CublasLt, require
from mlcompute.devices.cuda.cublaslt.product import NoAlgorithmError, Product

__all__ = ["CublasLt", "Matrix", "NoAlgorithmError", "Problem", "Product", "problem_of", "require"]
