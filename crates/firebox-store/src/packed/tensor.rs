//! A packed tensor, unpacked row by row.

use super::view::View;
use crate::block_type::BlockType;
use crate::encoding::{Dtype, Encoding};
use crate::gguf::low_bits::half_of_e8m0;
use crate::mapping::Mapping;
use crate::tensor_index::Span;

/// A stored tensor that is part of a packed one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stored {
    pub(crate) span: Span,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
}

/// Where the zero point of packed integers is.
#[derive(Debug, Clone)]
pub(super) enum Zeros {
    /// The same for all.
    Constant(f32),
    /// In words along the outputs, `[outputs / integers of a word, groups]`.
    AlongOutputs(Stored),
}

/// The parts of a packed tensor. Shapes have been checked against each other.
#[derive(Debug, Clone)]
pub(super) enum Form {
    /// Bytes with scales for blocks of rows and inputs, and zero points for the same blocks.
    Bytes { weight: Stored, scales: Stored, zeros: Option<Stored>, block: [usize; 2], columns: usize },
    /// Integers in words along the inputs of each row, padded to `padded`.
    Words {
        weight: Stored,
        scales: Stored,
        zeros: Zeros,
        groups: Option<Stored>,
        bits: usize,
        group: usize,
        padded: usize,
    },
    /// Integers in words along the inputs of each row, with a scale and an offset for every group.
    Affine { weight: Stored, scales: Stored, offsets: Stored, bits: usize, group: usize },
    /// `[inputs, outputs]`: words of eight outputs, interleaved.
    Awq { weight: Stored, zeros: Stored, scales: Stored, group: usize },
    /// `[inputs, outputs]`: words of several inputs; zero points in words along outputs.
    Gptq {
        weight: Stored,
        zeros: Stored,
        scales: Stored,
        groups: Option<Stored>,
        bits: usize,
        group: usize,
        less_one: bool,
    },
    /// `[experts, outputs, blocks, 16]` with exponents, which unpacks to `[experts, inputs, outputs]`.
    Mxfp4 { blocks: Stored, exponents: Stored },
    /// An expert of such a stack, `[outputs, blocks, 16]`, which unpacks to `[outputs, inputs]`.
    Mxfp4Expert { blocks: Stored, exponents: Stored },
    /// Plain numbers, `[inputs, outputs]`, which unpack to `[outputs, inputs]`.
    Transposed(Stored),
    /// Codes into a table, two a byte, the first in the high half; a magnitude for every block.
    Codes { weight: Stored, table: Stored, magnitudes: Magnitudes, block: usize },
}

/// The largest magnitudes of blocks of codes.
#[derive(Debug, Clone)]
pub(super) enum Magnitudes {
    Plain(Stored),
    /// Codes into a table themselves, with a magnitude for every block and an offset.
    Coded {
        codes: Stored,
        table: Stored,
        magnitudes: Stored,
        block: usize,
        offset: f32,
    },
}

/// A weight that several stored tensors make up.
#[derive(Debug, Clone)]
pub(crate) struct PackedTensor {
    pub(super) form: Form,
    /// The logical shape.
    pub(crate) shape: Vec<usize>,
    /// What it unpacks to.
    pub(crate) dtype: Dtype,
    /// How it is packed, in words.
    pub(crate) name: String,
}

/// The values of a four-bit float of one mantissa bit, doubled. GGUF has no negative zero.
const E2M1: [f32; 16] =
    [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, -0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0];

/// The nibble of a word that has each of eight consecutive outputs.
const AWQ_NIBBLES: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

impl PackedTensor {
    /// A matrix of plain numbers that lies as `[inputs, outputs]`.
    pub(crate) fn transposed(stored: Stored, [inputs, outputs]: [usize; 2]) -> Self {
        let dtype = stored.dtype;
        Self {
            form: Form::Transposed(stored),
            shape: vec![outputs, inputs],
            dtype,
            name: "transposed".into(),
        }
    }

    /// The matrices `[outputs, inputs]` of a stack of experts in MXFP4.
    pub(crate) fn experts(&self) -> Vec<Self> {
        let (Form::Mxfp4 { blocks, exponents }, &[experts, inputs, outputs]) = (&self.form, &self.shape[..])
        else {
            return Vec::new();
        };
        let part = |stored: &Stored, expert: usize| {
            let Span { file, start, len } = stored.span;
            let len = len / experts;
            let span = Span { file, start: start + expert * len, len };
            Stored { span, dtype: stored.dtype, shape: stored.shape[1..].to_vec() }
        };
        let expert = |expert| Self {
            form: Form::Mxfp4Expert { blocks: part(blocks, expert), exponents: part(exponents, expert) },
            shape: vec![outputs, inputs],
            ..self.clone()
        };
        (0..experts).map(expert).collect()
    }

    /// What it is unpacked to without loss: blocks, if its rows consist of them, or floats.
    pub(crate) fn encoding(&self) -> Encoding {
        match self.form {
            Form::Mxfp4Expert { .. } => Encoding::Block(BlockType::MXFP4),
            _ => Encoding::Plain(self.dtype),
        }
    }

    /// Appends the blocks of a row, if its [encoding](Self::encoding) has blocks.
    pub(crate) fn unpack_blocks(&self, files: &[Mapping], row: usize, out: &mut Vec<u8>) {
        let Form::Mxfp4Expert { blocks, exponents } = &self.form else { return };
        let bytes = |stored: &Stored, each: usize| {
            let count = each * (self.inputs() / 32);
            let Span { file, start, .. } = stored.span;
            &files[file].bytes()[start + row * count..][..count]
        };
        for (exponent, codes) in bytes(exponents, 1).iter().zip(bytes(blocks, 16).as_chunks::<16>().0) {
            // Neighbours share a byte here, and elements 16 apart there.
            let code = |at: usize| (codes[at / 2] >> (at % 2 * 4)) & 15;
            out.push(*exponent);
            out.extend((0..16).map(|at| code(at) | (code(at + 16) << 4)));
        }
    }

    /// The elements of a row.
    pub(crate) fn inputs(&self) -> usize {
        self.shape.last().copied().unwrap_or(0)
    }

    /// The number of rows, of all dimensions but the last.
    pub(crate) fn rows(&self) -> usize {
        self.shape.split_last().map_or(0, |(_, rows)| rows.iter().product())
    }

    /// The stored tensors, the weight first.
    pub(crate) fn spans(&self) -> Vec<Span> {
        let stored: Vec<&Stored> = match &self.form {
            Form::Bytes { weight, scales, zeros, .. } => [weight, scales].into_iter().chain(zeros).collect(),
            Form::Words { weight, scales, zeros, groups, .. } => {
                let zeros = match zeros {
                    Zeros::AlongOutputs(zeros) => Some(zeros),
                    Zeros::Constant(_) => None,
                };
                [weight, scales].into_iter().chain(zeros).chain(groups).collect()
            }
            Form::Affine { weight, scales, offsets, .. } => vec![weight, scales, offsets],
            Form::Awq { weight, zeros, scales, .. } => vec![weight, zeros, scales],
            Form::Gptq { weight, zeros, scales, groups, .. } => {
                [weight, zeros, scales].into_iter().chain(groups).collect()
            }
            Form::Mxfp4 { blocks, exponents } | Form::Mxfp4Expert { blocks, exponents } => {
                vec![blocks, exponents]
            }
            Form::Transposed(stored) => vec![stored],
            Form::Codes { weight, table, magnitudes, .. } => match magnitudes {
                Magnitudes::Plain(stored) => vec![weight, table, stored],
                Magnitudes::Coded { codes, table: outer, magnitudes, .. } => {
                    vec![weight, table, codes, outer, magnitudes]
                }
            },
        };
        stored.into_iter().map(|stored| stored.span).collect()
    }

    /// Appends the numbers of a row.
    pub(crate) fn unpack_row(&self, files: &[Mapping], row: usize, out: &mut Vec<f32>) -> Result<(), String> {
        let view = |stored: &Stored| {
            let Span { file, start, len } = stored.span;
            View { bytes: &files[file].bytes()[start..start + len], dtype: stored.dtype }
        };
        let inputs = self.inputs();
        match &self.form {
            Form::Bytes { weight, scales, zeros, block, columns } => {
                let (weight, scales, zeros) = (view(weight), view(scales), zeros.as_ref().map(view));
                let first = row / block[0] * columns;
                out.extend((0..inputs).map(|input| {
                    let at = first + input / block[1];
                    let zero = zeros.map_or(0.0, |zeros| zeros.number(at));
                    (weight.number(row * inputs + input) - zero) * scales.number(at)
                }));
            }
            Form::Words { weight, scales, zeros, groups, bits, group, padded } => {
                let (weight, scales, groups) = (view(weight), view(scales), groups.as_ref().map(view));
                let count = inputs.div_ceil(*group);
                for input in 0..inputs {
                    let at = group_of(groups, input, *group, count)?;
                    let zero = match zeros {
                        Zeros::Constant(zero) => *zero,
                        Zeros::AlongOutputs(stored) => {
                            let each = 32 / bits;
                            let word = view(stored).word(row / each * count + at);
                            ((word >> (row % each * bits)) & ((1 << bits) - 1)) as f32
                        }
                    };
                    let integer = weight.packed(row * padded + input, *bits) as f32;
                    out.push((integer - zero) * scales.number(row * count + at));
                }
            }
            Form::Affine { weight, scales, offsets, bits, group } => {
                let (weight, scales, offsets) = (view(weight), view(scales), view(offsets));
                let count = inputs / group;
                out.extend((0..inputs).map(|input| {
                    let at = row * count + input / group;
                    weight.packed(row * inputs + input, *bits) as f32 * scales.number(at) + offsets.number(at)
                }));
            }
            Form::Awq { weight, zeros, scales, group } => {
                let (weight, zeros, scales) = (view(weight), view(zeros), view(scales));
                let outputs = self.rows();
                let (word, shift) = (row / 8, 4 * AWQ_NIBBLES[row % 8]);
                let nibble =
                    |view: View<'_>, at: usize| ((view.word(at * (outputs / 8) + word) >> shift) & 15) as f32;
                out.extend((0..inputs).map(|input| {
                    let at = input / group;
                    (nibble(weight, input) - nibble(zeros, at)) * scales.number(at * outputs + row)
                }));
            }
            Form::Gptq { weight, zeros, scales, groups, bits, group, less_one } => {
                let (weight, zeros, scales) = (view(weight), view(zeros), view(scales));
                let (groups, outputs, each) = (groups.as_ref().map(view), self.rows(), 32 / bits);
                let (mask, less) = ((1u32 << bits) - 1, u32::from(*less_one));
                let count = inputs.div_ceil(*group);
                for input in 0..inputs {
                    let at = group_of(groups, input, *group, count)?;
                    let zero = zeros.word(at * (outputs / each) + row / each) >> (row % each * bits);
                    // What was stored less one wraps at zero.
                    let zero = ((zero & mask) + less) & mask;
                    let integer = (weight.word(input / each * outputs + row) >> (input % each * bits)) & mask;
                    out.push((integer as f32 - zero as f32) * scales.number(at * outputs + row));
                }
            }
            Form::Mxfp4 { blocks, exponents } => {
                let (blocks, exponents) = (view(blocks), view(exponents));
                let (outputs, inputs) = (inputs, self.shape[1]);
                let (expert, input) = (row / inputs, row % inputs);
                out.extend((0..outputs).map(|output| {
                    let at = (expert * outputs + output) * (inputs / 32) + input / 32;
                    let byte = blocks.bytes[at * 16 + input % 32 / 2];
                    let code = if input % 2 == 0 { byte & 15 } else { byte >> 4 };
                    half_of_e8m0(exponents.bytes[at]) * E2M1[usize::from(code)]
                }));
            }
            Form::Mxfp4Expert { blocks, exponents } => {
                let (blocks, exponents) = (view(blocks), view(exponents));
                out.extend((row * inputs..(row + 1) * inputs).map(|at| {
                    let code = (blocks.bytes[at / 2] >> (at % 2 * 4)) & 15;
                    half_of_e8m0(exponents.bytes[at / 32]) * E2M1[usize::from(code)]
                }));
            }
            Form::Transposed(stored) => {
                let (stored, outputs) = (view(stored), self.rows());
                out.extend((0..inputs).map(|input| stored.number(input * outputs + row)));
            }
            Form::Codes { weight, table, magnitudes, block } => {
                let (weight, table) = (view(weight), view(table));
                out.extend((row * inputs..(row + 1) * inputs).map(|at| {
                    let byte = weight.bytes[at / 2];
                    let code = if at % 2 == 0 { byte >> 4 } else { byte & 15 };
                    let magnitude = match magnitudes {
                        Magnitudes::Plain(stored) => view(stored).number(at / block),
                        Magnitudes::Coded { codes, table, magnitudes, block: outer, offset } => {
                            let index = at / block;
                            let code = usize::from(view(codes).bytes[index]);
                            view(table).number(code) * view(magnitudes).number(index / outer) + offset
                        }
                    };
                    table.number(code.into()) * magnitude
                }));
            }
        }
        Ok(())
    }
}

/// The group of an input: by its place, or as a tensor says.
fn group_of(groups: Option<View<'_>>, input: usize, group: usize, count: usize) -> Result<usize, String> {
    let Some(groups) = groups else { return Ok(input / group) };
    let at = groups.word(input) as usize;
    if at < count { Ok(at) } else { Err(format!("input {input} is of group {at}, of {count}")) }
}
