use burn::backend::Flex;
use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Shape};

use super::LinearOps;
use super::blocks::{BlockFormat, BlockRows, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
use super::rows::{Bf16, ByteRows, CHUNK, F16, NibbleRows, PlainRows, Rows, Scales};
use super::tiles;
use crate::flex::{dims, elements, tensor};

impl LinearOps for Flex {
    fn multiply(x: FlexTensor, weight: FlexTensor) -> FlexTensor {
        let weight = weight.to_contiguous();
        let [outputs, inputs] = dims(&weight);
        match weight.dtype() {
            DType::F32 => product(x, &PlainRows::<f32>::new(elements(&weight), inputs), outputs),
            DType::F16 => product(x, &PlainRows::<F16>::new(elements(&weight), inputs), outputs),
            DType::BF16 => product(x, &PlainRows::<Bf16>::new(elements(&weight), inputs), outputs),
            other => panic!("weights are f32, f16 or bf16, not {other:?}"),
        }
    }

    fn multiply_grouped(
        x: FlexTensor,
        words: FlexTensor,
        scales: FlexTensor,
        inputs: usize,
        group: usize,
        four_bits: bool,
    ) -> FlexTensor {
        let (words, scales) = (words.to_contiguous(), scales.to_contiguous());
        let ([outputs, words_per_row], [_, groups]) = (dims(&words), dims(&scales));
        let scales = Scales::new(elements(&scales), groups, group);
        if four_bits {
            product(x, &NibbleRows { bytes: elements(&words), scales, inputs }, outputs)
        } else {
            let stride = words_per_row * size_of::<u32>();
            product(x, &ByteRows { values: elements(&words), stride, scales, inputs }, outputs)
        }
    }

    fn multiply_blocks(x: FlexTensor, bytes: FlexTensor, format: BlockFormat) -> FlexTensor {
        let bytes = bytes.to_contiguous();
        with_blocks(&bytes, format, Multiply(x))
    }

    fn dequantize_blocks(bytes: FlexTensor, format: BlockFormat) -> FlexTensor {
        let bytes = bytes.to_contiguous();
        with_blocks(&bytes, format, Decode)
    }
}

/// Something to do with a weight of any block format.
trait WithRows {
    fn run(self, weight: &impl Rows, outputs: usize) -> FlexTensor;
}

struct Multiply(FlexTensor);

impl WithRows for Multiply {
    fn run(self, weight: &impl Rows, outputs: usize) -> FlexTensor {
        product(self.0, weight, outputs)
    }
}

struct Decode;

impl WithRows for Decode {
    fn run(self, weight: &impl Rows, outputs: usize) -> FlexTensor {
        let values = tiles::decode(weight, outputs);
        tensor(values, [outputs, weight.inputs()])
    }
}

fn with_blocks(bytes: &FlexTensor, format: BlockFormat, work: impl WithRows) -> FlexTensor {
    let [outputs, row_bytes] = dims(bytes);
    let inputs = row_bytes / format.bytes() * format.inputs();
    let bytes = elements(bytes);
    match format {
        BlockFormat::Q8_0 => work.run(&BlockRows::<Q8_0>::new(bytes, inputs), outputs),
        BlockFormat::Q4_0 => work.run(&BlockRows::<Q4_0>::new(bytes, inputs), outputs),
        BlockFormat::Q4_1 => work.run(&BlockRows::<Q4_1>::new(bytes, inputs), outputs),
        BlockFormat::Q5_0 => work.run(&BlockRows::<Q5_0>::new(bytes, inputs), outputs),
        BlockFormat::Q5_1 => work.run(&BlockRows::<Q5_1>::new(bytes, inputs), outputs),
        BlockFormat::Q4K => work.run(&BlockRows::<Q4K>::new(bytes, inputs), outputs),
        BlockFormat::Q5K => work.run(&BlockRows::<Q5K>::new(bytes, inputs), outputs),
        BlockFormat::Q6K => work.run(&BlockRows::<Q6K>::new(bytes, inputs), outputs),
    }
}

fn product(x: FlexTensor, weight: &impl Rows, outputs: usize) -> FlexTensor {
    let x = x.to_contiguous();
    let [rows, inputs] = dims(&x);
    assert_eq!(inputs, weight.inputs(), "the rows of x and of the weight differ in length");
    let values: &[f32] = elements(&x);
    let padded = inputs.next_multiple_of(CHUNK);
    let result = if padded == inputs {
        tiles::multiply(values, rows, weight, outputs)
    } else {
        let mut with_zeros = vec![0.0; rows * padded];
        for (to, from) in with_zeros.chunks_exact_mut(padded).zip(values.chunks_exact(inputs)) {
            to[..inputs].copy_from_slice(from);
        }
        tiles::multiply(&with_zeros, rows, weight, outputs)
    };
    let result = tensor(result, [outputs, rows]);
    if rows == 1 { result.reshape(Shape::new([1, outputs])) } else { result.transpose(0, 1) }
}
