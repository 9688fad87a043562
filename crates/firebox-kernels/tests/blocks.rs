//! Products with GGUF blocks compared with the store's decoding of the same bytes.

#![allow(clippy::unwrap_used)]

mod support;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use firebox_kernels::linear::{BlockFormat, dequantize_blocks, multiply_blocks};
use firebox_store::{BlockType, Encoding, Weight};
use support::{bits, in_eight_bits, random, random_blocks, values};

const FORMATS: [(BlockFormat, BlockType); 13] = [
    (BlockFormat::Q8_0, BlockType::Q8_0),
    (BlockFormat::Q4_0, BlockType::Q4_0),
    (BlockFormat::Q4_1, BlockType::Q4_1),
    (BlockFormat::Q5_0, BlockType::Q5_0),
    (BlockFormat::Q5_1, BlockType::Q5_1),
    (BlockFormat::Q4K, BlockType::Q4K),
    (BlockFormat::Q5K, BlockType::Q5K),
    (BlockFormat::Q6K, BlockType::Q6K),
    (BlockFormat::MXFP4, BlockType::MXFP4),
    (BlockFormat::IQ4NL, BlockType::IQ4NL),
    (BlockFormat::IQ4XS, BlockType::IQ4XS),
    (BlockFormat::Q3K, BlockType::Q3K),
    (BlockFormat::Q2K, BlockType::Q2K),
];

#[test]
fn products_match_the_blocks_the_store_decodes() {
    let device = Device::flex();
    for (format, stored) in FORMATS {
        assert_eq!((format.inputs(), format.bytes()), (stored.block_len(), stored.block_bytes()));
        let (outputs, blocks_per_row) = (7, 3);
        let inputs = blocks_per_row * format.inputs();
        let bytes = random_blocks(format, outputs * blocks_per_row);
        let weight = Weight {
            name: "weight".into(),
            shape: vec![outputs, inputs],
            encoding: Encoding::Block(stored),
            data: bytes.clone().into(),
            scales: None,
            mapped: false,
        };
        let expected = weight.to_f32().unwrap();
        let tensor = TensorData::from_bytes_vec(bytes, [outputs, blocks_per_row * format.bytes()], DType::U8);
        let tensor = Tensor::<2, Int>::from_data(tensor, (&device, DType::U8));
        let found = dequantize_blocks(tensor.clone(), format).into_data().try_to_vec::<f32>().unwrap();
        let largest = expected.iter().fold(0f32, |largest, value| largest.max(value.abs()));
        for (found, expected) in found.iter().zip(&expected) {
            assert!((found - expected).abs() <= 2e-7 * largest, "{format:?}: {found} instead of {expected}");
        }
        for rows in [1, 3, 20] {
            let x: Vec<f32> = (0..rows * inputs).map(|i| ((i * 37 % 19) as f32 - 9.0) / 9.0).collect();
            let x = in_eight_bits(x, inputs);
            let x = Tensor::<2>::from_data(TensorData::new(x, [rows, inputs]), &device);
            let plain = Tensor::<2>::from_data(TensorData::new(expected.clone(), [outputs, inputs]), &device);
            let found = multiply_blocks(x.clone(), tensor.clone(), format).into_data();
            let expected = x.matmul(plain.transpose()).into_data();
            let found = found.try_to_vec::<f32>().unwrap();
            // Activations are rounded; see the products of grouped weights.
            let tolerance = largest * (1e-6 * inputs as f32 + 4e-5 * (inputs as f32).sqrt());
            for (found, expected) in found.iter().zip(expected.try_to_vec::<f32>().unwrap()) {
                assert!((found - expected).abs() <= tolerance, "{format:?}, {rows} rows");
            }
        }
    }
}

fn weight(format: BlockFormat, outputs: usize, blocks: usize) -> Tensor<2, Int> {
    let bytes = random_blocks(format, outputs * blocks);
    let data = TensorData::from_bytes_vec(bytes, [outputs, blocks * format.bytes()], DType::U8);
    Tensor::from_data(data, (&Device::flex(), DType::U8))
}

/// A row has the same bits alone and among others, whatever panels the outputs are in.
#[test]
fn rows_are_independent() {
    for (format, _) in FORMATS {
        for (outputs, blocks) in [(7, 3), (16, 1), (17, 9), (40, 2), (70, 1)] {
            let weight = weight(format, outputs, blocks);
            let x = random([20, blocks * format.inputs()], 5);
            let alone: Vec<Vec<u32>> = (0..20)
                .map(|row| bits(multiply_blocks(x.clone().narrow(0, row, 1), weight.clone(), format)))
                .collect();
            for rows in [2, 3, 5, 7, 20] {
                let together = bits(multiply_blocks(x.clone().narrow(0, 0, rows), weight.clone(), format));
                for (alone, together) in alone.iter().zip(together.chunks(outputs)) {
                    assert_eq!(alone, together, "{format:?}, {outputs} outputs, {rows} rows");
                }
            }
        }
    }
}

#[test]
fn threads_do_not_change_a_bit() {
    for (format, _) in FORMATS {
        let blocks = 1024 / format.inputs();
        let weight = weight(format, 1500, blocks);
        for rows in [1, 6] {
            let x = random([rows, 1024], 9);
            let compute = |threads: usize| {
                let (x, weight) = (x.clone(), weight.clone());
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                pool.install(move || bits(multiply_blocks(x, weight, format)))
            };
            let alone = compute(1);
            for threads in [2, 5] {
                assert_eq!(compute(threads), alone, "{format:?}, {rows} rows, {threads} threads");
            }
        }
    }
}

#[test]
fn odd_rows_stay_among_themselves() {
    for (format, _) in FORMATS {
        let weight = weight(format, 20, 2);
        let clean = random([3, 2 * format.inputs()], 3);
        for bad in [f32::NAN, f32::INFINITY] {
            let x = clean.clone().slice_fill([1..2, 4..5], bad);
            let found = multiply_blocks(x.clone(), weight.clone(), format);
            let expected = multiply_blocks(clean.clone(), weight.clone(), format);
            assert!(
                values(found.clone().narrow(0, 1, 1)).iter().all(|value| !value.is_finite()),
                "{format:?}"
            );
            for row in [0, 2] {
                assert_eq!(bits(found.clone().narrow(0, row, 1)), bits(expected.clone().narrow(0, row, 1)));
            }
            let alone = multiply_blocks(x.narrow(0, 1, 1), weight.clone(), format);
            assert!(values(alone).iter().all(|value| !value.is_finite()), "{format:?}");
        }
        let nothing = Tensor::<2>::zeros([0, 2 * format.inputs()], &Device::flex());
        assert_eq!(multiply_blocks(nothing, weight, format).dims(), [0, 20]);
    }
}
