"""How many cases of ONNX's own suite pass. docs/robustness.md quotes these; test_backend.py checks them."""

#: Computed by an engine from fed inputs.
PASSED = 1632
#: All of it computed at import, because shapes or types depend on the inputs, which are then constants.
FOLDED = 275
#: Not imported by design: operator and reason -> number of cases.
UNSUPPORTED: dict[str, int] = {
    "Equal: strings cannot be computed with": 2,
    "Identity: an input is a sequence": 1,
    "Identity: an input is an optional value": 1,
    "ImageDecoder: it decodes files, it does not compute": 9,
    "Loop: an input is a sequence": 1,
    "Loop: an input is an optional value": 1,
    "NonMaxSuppression: the shape of its result depends on computed numbers": 10,
    "Optional: lists and optional values have no place in a graph of tensors": 1,
    "OptionalGetElement: an input is a sequence": 1,
    "OptionalGetElement: an input is an optional value": 2,
    "OptionalGetElement: lists and optional values have no place in a graph of tensors": 1,
    "OptionalHasElement: an input is an optional value": 3,
    "OptionalHasElement: lists and optional values have no place in a graph of tensors": 4,
    "QuantizeLinear: QuantizeLinear to float4_e2m1fn": 1,
    "QuantizeLinear: QuantizeLinear to float8_e4m3fn": 1,
    "QuantizeLinear: QuantizeLinear to float8_e5m2": 1,
    "QuantizeLinear: QuantizeLinear to int2": 1,
    "QuantizeLinear: QuantizeLinear to int4": 1,
    "QuantizeLinear: QuantizeLinear to uint2": 1,
    "QuantizeLinear: QuantizeLinear to uint4": 1,
    "RandomUniformLike: random numbers come from the training graph, not from the model": 6,
    "RegexFullMatch: strings cannot be computed with": 3,
    "SequenceInsert: an input is a sequence": 2,
    "SequenceLength: an input is a sequence": 6,
    "SequenceMap: an input is a sequence": 6,
    "StringConcat: strings cannot be computed with": 5,
    "StringNormalizer: strings cannot be computed with": 12,
    "StringSplit: strings cannot be computed with": 6,
    "TfIdfVectorizer: strings cannot be computed with": 7,
    "ai.onnx.ml.Binarizer: trees, encoders and the like are not networks": 1,
    "ai.onnx.ml.LabelEncoder: strings cannot be computed with": 4,
    "ai.onnx.ml.TreeEnsemble: trees, encoders and the like are not networks": 2,
    "doubles outside of the range of float32, in which they are computed": 5,
    "output: is a sequence": 4,
    "the expected output is one draw of another random generator": 4,
}
