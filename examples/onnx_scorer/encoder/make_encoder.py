#!/usr/bin/env python3
"""Writes `encoder.onnx`: a sentence encoder that knows nothing but which pieces of words two texts share.

    pip install onnx numpy
    python make_encoder.py

A piece is a row of a table of random numbers. A text is the mean of the rows of its pieces, turned, and scaled to length
one; rows of different pieces are all but at right angles, so that the cosine of two texts says how many pieces they share.
It stands for any encoder that somebody has as an ONNX file. What the file computes for some pieces is printed by `onnx`'s
own evaluator, for the test in `src/main.rs`.
"""
import pathlib

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

ROWS, WIDTH = 512, 32

random = np.random.default_rng(1)
table = (random.standard_normal((ROWS, WIDTH)) / WIDTH**0.5).astype(np.float32)
turn = np.linalg.qr(random.standard_normal((WIDTH, WIDTH)))[0].astype(np.float32)

graph = helper.make_graph(
    [
        helper.make_node("Gather", ["table", "pieces"], ["rows"], axis=0),
        helper.make_node("ReduceMean", ["rows", "first"], ["mean"], keepdims=1),
        helper.make_node("MatMul", ["mean", "turn"], ["turned"]),
        helper.make_node("LpNormalization", ["turned"], ["direction"], axis=1, p=2),
    ],
    "encoder",
    [helper.make_tensor_value_info("pieces", TensorProto.INT64, ["count"])],
    [helper.make_tensor_value_info("direction", TensorProto.FLOAT, [1, WIDTH])],
    [
        numpy_helper.from_array(table, "table"),
        numpy_helper.from_array(turn, "turn"),
        numpy_helper.from_array(np.array([0], dtype=np.int64), "first"),
    ],
)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
onnx.checker.check_model(model)
onnx.save(model, pathlib.Path(__file__).parent / "encoder.onnx")

pieces = np.array([0, 7, 7, 300, 511], dtype=np.int64)
[direction] = ReferenceEvaluator(model).run(None, {"pieces": pieces})
print(pieces.tolist(), [round(float(number), 6) for number in direction[0, :4]])
