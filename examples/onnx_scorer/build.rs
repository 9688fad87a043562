//! Turns the ONNX file into Rust code, with its numbers as part of the program.

use burn_onnx::{LoadStrategy, ModelGen};

fn main() {
    ModelGen::new()
        .input("encoder/encoder.onnx")
        .out_dir("encoder/")
        .load_strategy(LoadStrategy::Embedded)
        .run_from_script();
}
