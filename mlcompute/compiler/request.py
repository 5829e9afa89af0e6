"""Request: what a training or inference graph asks the compiler for."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlcompute.building.node_index import NodeIndex
from mlcompute.graph import Node
from mlcompute.layers.layer import Layer
from mlcompute.ops.op import Array, Shape
from mlcompute.optimizers.optimizer import Members, Optimizer
from mlcompute.tensor import Tensor, TensorDescriptor

#: An order of sums: a part by its number, or what is added up on the left and on the right.
Tree = int | tuple["Tree", "Tree"]


@dataclass(eq=False)
class Request:
    """What a training or inference graph asks the compiler for.

    index           what was found in one loop over all nodes of the graph; empty where some of them were left out
    inputs          tensors fed before each run -> samples they hold per sample of the batch; 0: not scaled
    constants       inputs whose data is known now
    labels          what losses compare with, as far as that is declared; they are fed with inputs, or computed
    prediction      what a loss given as a function compares with them
    kept            tensors that stay readable after every run; `kept_gradients`: tensors whose gradients do
    debugged        tensors that stay readable together with their gradients
    shared          inputs and constants of which no axis counts samples
    added           floating tensors that are added to others as they are: see Layer.adds_source
    result          what a run gives
    minimised       the sum of these is: the gradient pass starts from them, with ones
    total           that sum as a tensor of its own, where there are several
    averaged        those of them that are means over the samples: a slice of the batch counts by its share in it
    slices          into how many slices a batch is cut
    sends_early     are gradients sent to other machines, while others are still computed?
    summands        a program that only updates: in which order it adds up the parts of a gradient; 0: there is one part
    summed          what it only adds up, in the same order: statistics and losses
    out_of_place    it leaves new parameters elsewhere; `moves_states`: new optimizer state, too
    streams         other processes of this machine read them there
    user_gradients  tensor a gradient from outside is fed to -> the tensor whose gradient it adds to
    gradient_inputs   parameters of a program that only updates -> inputs for their gradients
    wanted          tensors that are not parameters but need a gradient
    parameters      tensors the optimizer updates
    groups          those that belong to groups of the optimizer -> which ones
    precision       "float32", or "bf16": activations in bfloat16
    described       tensors whose extents differ from their own descriptors in this program, besides the batch
    """

    nodes: list[Node] = field(default_factory=list)
    index: NodeIndex = field(default_factory=NodeIndex)
    batch_size: int = 1
    inputs: dict[Tensor, int] = field(default_factory=dict)
    constants: dict[Tensor, Array] = field(default_factory=dict)
    labels: set[Tensor] = field(default_factory=set)
    prediction: Tensor | None = None
    label_weights: dict[Layer, Tensor] = field(default_factory=dict)
    kept: list[Tensor] = field(default_factory=list)
    kept_gradients: list[Tensor] = field(default_factory=list)
    debugged: list[Tensor] = field(default_factory=list)
    shared: set[Tensor] = field(default_factory=set)
    added: set[Tensor] = field(default_factory=set)
    result: Tensor | None = None
    minimised: list[Tensor] = field(default_factory=list)
    averaged: set[Tensor] = field(default_factory=set)
    slices: int = 1
    sends_early: bool = False
    summands: Tree = 0
    summed: list[Tensor] = field(default_factory=list)
    out_of_place: bool = False
    moves_states: bool = False
    streams: bool = False
    total: Tensor | None = None
    stopped: set[Tensor] = field(default_factory=set)
    user_gradients: dict[Tensor, Tensor] = field(default_factory=dict)
    gradient_inputs: dict[Tensor, Tensor] = field(default_factory=dict)
    wanted: list[Tensor] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    groups: dict[Tensor, Members] = field(default_factory=dict)
    optimizer: Optimizer | None = None
    fuses: bool = True
    precision: str = "float32"
    described: dict[Tensor, TensorDescriptor] = field(default_factory=dict)

    def shape_of(self, tensor: Tensor) -> Shape:
        """The shape of a tensor with the full batch."""
        return self.described.get(tensor, tensor.descriptor).shape
