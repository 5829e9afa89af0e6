"""Builders: `graph.convolution(x, 32, kernel=3, activation="relu")` instead of tensors and descriptors by hand.

They are functions whose first argument is a graph; `Graph` has them as methods. Each adds plain layers with `node` and
returns the result tensor. Nothing is hidden: the tensors, descriptors and layers they make are those one would write by
hand, and are found in `graph.layers` or by name with `graph.layer(name)`. A layer without a name gets its kind and a
number (dense1, dense2, ...); its tensors are labelled `name.slot`, an activation that comes with it `name_relu`.
"""
