"""Readers of files under attack, by the million. `python -m tests.fuzzing FOLDER` runs until every goal is reached.

choices.py    decisions taken from bytes: a fuzzer that changes the bytes changes the decisions
json_edits.py, byte_edits.py, proto_edits.py    damage to a value, to bytes, to an ONNX model
target.py     what a reader must keep: one kind of error, a second, 64 MB and twice the file, nothing half done
description.py, texts.py, header.py, checkpoint.py, onnx_model.py    one reader each
watch.py      asks all that of every run, and writes down what goes wrong
__main__.py   rounds of coverage-guided fuzzing with atheris, counted in a file
"""
