//! Finds the stored tensors that make up packed ones, and checks their shapes against each other.

use std::collections::BTreeMap;

use serde_json::Value;

use super::scheme::{Packing, Scheme, torch_dtype};
use super::tensor::{Form, Magnitudes, PackedTensor, Stored, Zeros};
use crate::encoding::Dtype;
use crate::error::Fault;
use crate::excerpt::Shape;
use crate::mapping::Mapping;

/// Stored tensors by name, from which packed ones are taken.
pub(crate) struct Layout<'a> {
    pub(crate) stored: BTreeMap<String, Stored>,
    pub(crate) files: &'a [Mapping],
    pub(crate) packing: Packing,
}

/// A packed tensor: its logical name, its parts, its shape, and the dtype it unpacks to.
type Found = (String, Form, Vec<usize>, Dtype);

/// Scales of activations and of the KV cache, which are computed anew.
const UNUSED: [&str; 6] =
    [".input_scale", ".k_scale", ".v_scale", ".q_scale", ".input_zero_point", ".weight_format"];

/// Stored beside the codes of `bitsandbytes`, before its quantization type.
const QUANT_STATE: &str = ".quant_state.bitsandbytes__";

impl Layout<'_> {
    /// Takes all packed tensors, by logical name. What remains is stored plainly.
    pub(crate) fn take_all(&mut self) -> Result<Vec<(String, PackedTensor)>, Fault> {
        let names: Vec<String> = self.stored.keys().cloned().collect();
        let mut found = Vec::new();
        for name in names {
            // Of several stored tensors of a packed one, the first takes the others.
            if self.stored.contains_key(&name)
                && let Some((logical, form, shape, dtype)) = self.packed(&name)?
            {
                let name = self.packing.scheme.name();
                found.push((logical, PackedTensor { form, shape, dtype, name }));
            }
        }
        if let Scheme::Bytes { .. } = self.packing.scheme
            && let Some(name) = self.stored.keys().find(|name| self.is(name, Dtype::F8E4M3))
        {
            let reason =
                "FP8 without a weight_scale of its own; only matrices with scales beside them are read";
            return Err(Fault::unsupported(field(name), reason));
        }
        if !found.is_empty() {
            self.stored.retain(|name, _| !UNUSED.iter().any(|end| name.ends_with(end)));
        }
        Ok(found)
    }

    fn packed(&mut self, name: &str) -> Result<Option<Found>, Fault> {
        let of = |end: &str| name.strip_suffix(end).map(str::to_owned);
        match self.packing.scheme {
            Scheme::Bytes { block } => match of(".weight") {
                Some(base) if self.has_scales(&base) => self.bytes(&base, block).map(Some),
                _ => Ok(None),
            },
            Scheme::Compressed { bits, group } => {
                of(".weight_packed").map(|base| self.compressed(&base, bits, group)).transpose()
            }
            Scheme::Awq { group } => of(".qweight").map(|base| self.awq(&base, group)).transpose(),
            Scheme::Gptq { bits, group, zeros_less_one } => {
                of(".qweight").map(|base| self.gptq(&base, bits, group, zeros_less_one)).transpose()
            }
            Scheme::Mxfp4 => of("_blocks").map(|base| self.mxfp4(&base)).transpose(),
            Scheme::Mlx { group, .. } => match of(".weight") {
                Some(base) if self.stored.contains_key(&format!("{base}.scales")) => {
                    self.mlx(&base, group).map(Some)
                }
                _ => Ok(None),
            },
            Scheme::FourBitCodes => {
                let state = self.stored.range(format!("{name}{QUANT_STATE}")..).next();
                let state = state.filter(|(key, _)| key.starts_with(&format!("{name}{QUANT_STATE}")));
                let state = state.map(|(key, _)| key.clone());
                state.map(|state| self.codes(name, &state)).transpose()
            }
        }
    }

    fn is(&self, name: &str, dtype: Dtype) -> bool {
        self.stored.get(name).is_some_and(|stored| stored.dtype == dtype)
    }

    fn has_scales(&self, base: &str) -> bool {
        let packed =
            [Dtype::F8E4M3, Dtype::I8].into_iter().any(|dtype| self.is(&format!("{base}.weight"), dtype));
        let scaled = ["weight_scale_inv", "weight_scale"]
            .iter()
            .any(|end| self.stored.contains_key(&format!("{base}.{end}")));
        packed && scaled
    }

    /// Takes a tensor that has to be there, of one of these dtypes.
    fn take(&mut self, name: &str, dtypes: &[Dtype]) -> Result<Stored, Fault> {
        let Some(stored) = self.stored.remove(name) else {
            return Err(Fault::new(field(name), "missing beside its weight; download the model again"));
        };
        if dtypes.contains(&stored.dtype) {
            return Ok(stored);
        }
        let known: Vec<&str> = dtypes.iter().map(|dtype| dtype.name()).collect();
        Err(Fault::unsupported(field(name), format!("of {}; known is {}", stored.dtype, known.join(", "))))
    }

    fn take_if_there(&mut self, name: &str, dtypes: &[Dtype]) -> Result<Option<Stored>, Fault> {
        if self.stored.contains_key(name) { self.take(name, dtypes).map(Some) } else { Ok(None) }
    }

    fn bytes(&mut self, base: &str, block: [usize; 2]) -> Result<Found, Fault> {
        let name = format!("{base}.weight");
        let weight = self.take(&name, &[Dtype::F8E4M3, Dtype::I8])?;
        let [rows, inputs] = matrix(&name, &weight)?;
        let inverse = format!("{base}.weight_scale_inv");
        let scale_name =
            if self.stored.contains_key(&inverse) { inverse } else { format!("{base}.weight_scale") };
        let scales = self.take(&scale_name, &FLOATS)?;
        // One scale for all, one a row, or one a block.
        let (block, columns) = match scales.shape.as_slice() {
            [] | [1] | [1, 1] => ([rows, inputs], 1),
            [count] | [count, 1] if *count == rows => ([1, inputs], 1),
            [high, wide] if [*high, *wide] == [rows.div_ceil(block[0]), inputs.div_ceil(block[1])] => {
                (block, *wide)
            }
            other => {
                let reason = format!(
                    "shape {:?} for {rows} rows of {inputs} inputs in blocks of {} by {}",
                    Shape(other),
                    block[0],
                    block[1]
                );
                return Err(Fault::new(field(&scale_name), reason));
            }
        };
        let zero_name = format!("{base}.weight_zero_point");
        let zeros = self.take_if_there(&zero_name, &[Dtype::I8])?;
        if let Some(zeros) = &zeros {
            same(&zero_name, count(zeros), count(&scales))?;
        }
        let dtype = self.unpacked(&scales);
        Ok((name, Form::Bytes { weight, scales, zeros, block, columns }, vec![rows, inputs], dtype))
    }

    /// The dtype to unpack to: that of the scales, unless they are wider than the model.
    fn unpacked(&self, scales: &Stored) -> Dtype {
        if scales.dtype == Dtype::F32 { self.packing.dtype } else { scales.dtype }
    }

    fn compressed(&mut self, base: &str, bits: usize, group: Option<usize>) -> Result<Found, Fault> {
        let packed = format!("{base}.weight_packed");
        let weight = self.take(&packed, &[Dtype::I32])?;
        let [rows, words] = matrix(&packed, &weight)?;
        let padded = words * (32 / bits);
        let shape_name = format!("{base}.weight_shape");
        let stated = self.take(&shape_name, &[Dtype::I64, Dtype::I32])?;
        let stated = self.integers(&stated);
        let inputs = match stated[..] {
            [high, wide]
                if high == rows as u64 && wide > 0 && wide.div_ceil(32 / bits as u64) == words as u64 =>
            {
                wide as usize
            }
            _ => {
                return Err(Fault::new(
                    field(&shape_name),
                    format!("{stated:?} for {rows} rows of {words} words"),
                ));
            }
        };
        let group = group.unwrap_or(inputs).min(inputs);
        let scale_name = format!("{base}.weight_scale");
        let scales = self.take(&scale_name, &FLOATS)?;
        let groups = inputs.div_ceil(group);
        same(&scale_name, count(&scales), rows * groups)?;
        let zero_name = format!("{base}.weight_zero_point");
        let zeros = match self.take_if_there(&zero_name, &[Dtype::I32])? {
            Some(zeros) => {
                same(&zero_name, count(&zeros), rows.div_ceil(32 / bits) * groups)?;
                Zeros::AlongOutputs(zeros)
            }
            None => Zeros::Constant((1 << (bits - 1)) as f32),
        };
        let index = self.group_index(&format!("{base}.weight_g_idx"), inputs)?;
        let dtype = self.unpacked(&scales);
        let form = Form::Words { weight, scales, zeros, groups: index, bits, group, padded };
        Ok((format!("{base}.weight"), form, vec![rows, inputs], dtype))
    }

    fn group_index(&mut self, name: &str, inputs: usize) -> Result<Option<Stored>, Fault> {
        let index = self.take_if_there(name, &[Dtype::I32])?;
        // Some writers leave an empty one.
        let index = index.filter(|index| count(index) > 0);
        if let Some(index) = &index {
            same(name, count(index), inputs)?;
        }
        Ok(index)
    }

    fn awq(&mut self, base: &str, group: Option<usize>) -> Result<Found, Fault> {
        let (name, zero_name, scale_name) =
            (format!("{base}.qweight"), format!("{base}.qzeros"), format!("{base}.scales"));
        let weight = self.take(&name, &[Dtype::I32])?;
        let [inputs, words] = matrix(&name, &weight)?;
        let (group, outputs) = (group.unwrap_or(inputs), words * 8);
        whole_groups(&name, inputs, group)?;
        let (zeros, scales) = (self.take(&zero_name, &[Dtype::I32])?, self.take(&scale_name, &FLOATS)?);
        same(&zero_name, count(&zeros), inputs / group * words)?;
        same(&scale_name, count(&scales), inputs / group * outputs)?;
        let dtype = self.unpacked(&scales);
        Ok((
            format!("{base}.weight"),
            Form::Awq { weight, zeros, scales, group },
            vec![outputs, inputs],
            dtype,
        ))
    }

    fn gptq(
        &mut self,
        base: &str,
        bits: usize,
        group: Option<usize>,
        less_one: bool,
    ) -> Result<Found, Fault> {
        let (name, zero_name, scale_name) =
            (format!("{base}.qweight"), format!("{base}.qzeros"), format!("{base}.scales"));
        let weight = self.take(&name, &[Dtype::I32])?;
        let [words, outputs] = matrix(&name, &weight)?;
        let (each, inputs) = (32 / bits, words * (32 / bits));
        let group = group.unwrap_or(inputs).min(inputs);
        let groups = inputs.div_ceil(group);
        if !outputs.is_multiple_of(each) {
            return Err(Fault::new(
                field(&name),
                format!("{outputs} outputs; expected a multiple of {each}"),
            ));
        }
        let (zeros, scales) = (self.take(&zero_name, &[Dtype::I32])?, self.take(&scale_name, &FLOATS)?);
        same(&zero_name, count(&zeros), groups * (outputs / each))?;
        same(&scale_name, count(&scales), groups * outputs)?;
        let index = self.group_index(&format!("{base}.g_idx"), inputs)?;
        let dtype = self.unpacked(&scales);
        let form = Form::Gptq { weight, zeros, scales, groups: index, bits, group, less_one };
        Ok((format!("{base}.weight"), form, vec![outputs, inputs], dtype))
    }

    fn mxfp4(&mut self, base: &str) -> Result<Found, Fault> {
        let (name, exponent_name) = (format!("{base}_blocks"), format!("{base}_scales"));
        let blocks = self.take(&name, &[Dtype::U8])?;
        let [experts, outputs, count, 16] = blocks.shape[..] else {
            let reason = format!("shape {:?}; expected [experts, outputs, blocks, 16]", Shape(&blocks.shape));
            return Err(Fault::new(field(&name), reason));
        };
        let exponents = self.take(&exponent_name, &[Dtype::U8])?;
        same(&exponent_name, self::count(&exponents), experts * outputs * count)?;
        // As the model's own code unpacks them: transposed, and in numbers that hold all values exactly.
        let shape = vec![experts, count * 32, outputs];
        Ok((base.to_owned(), Form::Mxfp4 { blocks, exponents }, shape, Dtype::BF16))
    }

    fn mlx(&mut self, base: &str, group: usize) -> Result<Found, Fault> {
        let (name, scale_name, offset_name) =
            (format!("{base}.weight"), format!("{base}.scales"), format!("{base}.biases"));
        let weight = self.take(&name, &[Dtype::U32])?;
        let (scales, offsets) = (self.take(&scale_name, &FLOATS)?, self.take(&offset_name, &FLOATS)?);
        let ([rows, words], [_, groups]) = (matrix(&name, &weight)?, matrix(&scale_name, &scales)?);
        // Single layers may have another width than the model.
        let inputs = groups.saturating_mul(group);
        let bits = [2, 4, 8].into_iter().find(|bits| inputs.checked_mul(*bits) == words.checked_mul(32));
        let Some(bits) = bits else {
            let reason = format!("{words} words for {groups} groups of {group}; known are 2, 4 and 8 bits");
            return Err(Fault::unsupported(field(&name), reason));
        };
        same(&scale_name, count(&scales), rows * groups)?;
        same(&offset_name, count(&offsets), rows * groups)?;
        let dtype = self.unpacked(&scales);
        Ok((name, Form::Affine { weight, scales, offsets, bits, group }, vec![rows, inputs], dtype))
    }

    fn codes(&mut self, name: &str, state_name: &str) -> Result<Found, Fault> {
        let state = self.take(state_name, &[Dtype::U8])?;
        let span = state.span;
        let state: Value =
            serde_json::from_slice(&self.files[span.file].bytes()[span.start..span.start + span.len])
                .map_err(|error| Fault::json(field(state_name), &error))?;
        let number = |key: &str| {
            state[key].as_u64().and_then(|value| usize::try_from(value).ok()).filter(|value| *value > 0)
        };
        let wrong = |key: &str| Fault::new(field(state_name), format!("{key} is {}", state[key]));
        let block = number("blocksize").ok_or_else(|| wrong("blocksize"))?;
        let dtype = state["dtype"].as_str().and_then(torch_dtype).ok_or_else(|| wrong("dtype"))?;
        let shape: Option<Vec<usize>> = state["shape"]
            .as_array()
            .and_then(|shape| shape.iter().map(|size| usize::try_from(size.as_u64()?).ok()).collect());
        let shape = shape.filter(|shape| shape.len() == 2).ok_or_else(|| wrong("shape"))?;
        let weight = self.take(name, &[Dtype::U8])?;
        let elements = count(&weight).saturating_mul(2);
        same(name, elements, shape[0].saturating_mul(shape[1]))?;
        let blocks = elements.div_ceil(block);
        let table_name = format!("{name}.quant_map");
        let table = self.take(&table_name, &FLOATS)?;
        same(&table_name, count(&table), 16)?;
        let magnitude_name = format!("{name}.absmax");
        let stored = self.take(&magnitude_name, &[Dtype::U8, Dtype::F32])?;
        same(&magnitude_name, count(&stored), blocks)?;
        let magnitudes = if stored.dtype == Dtype::F32 {
            Magnitudes::Plain(stored)
        } else {
            let outer = number("nested_blocksize").ok_or_else(|| wrong("nested_blocksize"))?;
            let offset = state["nested_offset"].as_f64().ok_or_else(|| wrong("nested_offset"))? as f32;
            let (table_name, outer_name) =
                (format!("{name}.nested_quant_map"), format!("{name}.nested_absmax"));
            let (table, magnitudes) = (self.take(&table_name, &FLOATS)?, self.take(&outer_name, &FLOATS)?);
            same(&table_name, count(&table), 256)?;
            same(&outer_name, count(&magnitudes), blocks.div_ceil(outer))?;
            Magnitudes::Coded { codes: stored, table, magnitudes, block: outer, offset }
        };
        Ok((name.to_owned(), Form::Codes { weight, table, magnitudes, block }, shape, dtype))
    }

    /// The numbers of a small tensor of integers.
    fn integers(&self, stored: &Stored) -> Vec<u64> {
        let bytes = &self.files[stored.span.file].bytes()[stored.span.start..][..stored.span.len];
        match stored.dtype {
            Dtype::I64 => bytes.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect(),
            _ => bytes.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes).into()).collect(),
        }
    }
}

const FLOATS: [Dtype; 3] = [Dtype::F16, Dtype::BF16, Dtype::F32];

fn field(name: &str) -> String {
    format!("tensor {name:?}")
}

fn count(stored: &Stored) -> usize {
    stored.shape.iter().product()
}

fn matrix(name: &str, stored: &Stored) -> Result<[usize; 2], Fault> {
    match stored.shape[..] {
        [rows, inputs] if rows > 0 && inputs > 0 => Ok([rows, inputs]),
        _ => Err(Fault::new(field(name), format!("shape {:?}; expected a matrix", Shape(&stored.shape)))),
    }
}

fn same(name: &str, found: usize, expected: usize) -> Result<(), Fault> {
    if found == expected {
        return Ok(());
    }
    Err(Fault::new(field(name), format!("{found} numbers; the shape of the weight needs {expected}")))
}

fn whole_groups(name: &str, inputs: usize, group: usize) -> Result<(), Fault> {
    if inputs.is_multiple_of(group) {
        return Ok(());
    }
    Err(Fault::new(field(name), format!("{inputs} inputs are no whole groups of {group}")))
}
