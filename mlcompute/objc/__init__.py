"""ML Compute under its Objective-C names, as PyObjC spells them: change the import, keep the script.

    from mlcompute.objc import *

    device = MLCDevice.cpuDevice()
    x = MLCTensor.tensorWithShape_dataType_([32, 784], MLCDataTypeFloat32)
    graph = MLCTrainingGraph.graphWithGraphObjects_lossLayer_optimizer_([g], loss, optimizer)
    graph.executeForwardWithBatchSize_options_completionHandler_(32, 0, None)

Properties are called (`tensor.descriptor()`, `optimizer.setLearningRate_(0.1)`), as PyObjC does. Objects are thin
wrappers; `.python` is the object of `mlcompute` behind one, and `wrap` goes the other way. Failures raise, as
everywhere in `mlcompute`.
"""

from __future__ import annotations

from mlcompute.objc.names import CLASSES, CONSTANTS, FUNCTIONS, TYPES
from mlcompute.objc.proxies import Proxy, debug_function, proxy_classes, wrap

globals().update(proxy_classes(CLASSES))
globals().update(CONSTANTS)
globals().update(TYPES)
globals().update({name: debug_function(name, argument) for name, argument in FUNCTIONS.items()})

__all__ = ["Proxy", "wrap", *CLASSES, *CONSTANTS, *TYPES, *FUNCTIONS]
