//! The tensors of a session file: how keys, values, states and tokens are laid out in it.

use burn::tensor::{AllocationProperty, Bytes, DType, Device, Int, Tensor, TensorData};
use firebox_cache::{
    KvType, LayerKv, LayerLayout, Layout, MappedKv, Outline, RecurrentState, SequenceCache, SlotRange,
};
use firebox_kernels::attention::KvTensor;
use firebox_kernels::host_device;
use firebox_model::{Decoder, MixerMemory};
use firebox_store::{Dtype, StoreError, TensorFile};

use super::TOKENS;
use crate::RuntimeError;

/// One kind of numbers that a layer caches for every position: keys, values, latents, or states at the split.
pub(super) struct Side {
    pub name: &'static str,
    pub kv_type: KvType,
    pub heads: usize,
    pub width: usize,
}

pub(super) fn sides(layer: &LayerLayout, kv_type: KvType) -> Vec<Side> {
    match *layer {
        LayerLayout::Attention { kv_heads: heads, head_dim: width } => {
            ["keys", "values"].map(|name| Side { name, kv_type, heads, width }).into()
        }
        LayerLayout::Latents { width } => vec![Side { name: "latents", kv_type, heads: 1, width }],
        LayerLayout::HiddenStates { width } => {
            vec![Side { name: "states", kv_type: KvType::F32, heads: 1, width }]
        }
        LayerLayout::Shared { .. } | LayerLayout::Recurrent => Vec::new(),
    }
}

/// A tensor of keys or values.
pub(super) struct Part {
    pub suffix: &'static str,
    pub dtype: Dtype,
    /// Elements of one head at one position; `None` for a single one.
    pub width: Option<usize>,
}

pub(super) fn parts(kv_type: KvType, head_dim: usize) -> Vec<Part> {
    match kv_type {
        KvType::F32 => vec![Part { suffix: "", dtype: Dtype::F32, width: Some(head_dim) }],
        KvType::F16 => vec![Part { suffix: "", dtype: Dtype::F16, width: Some(head_dim) }],
        KvType::Int8 => vec![
            Part { suffix: ".words", dtype: Dtype::I32, width: Some(head_dim.div_ceil(size_of::<i32>())) },
            Part { suffix: ".scales", dtype: Dtype::F32, width: None },
        ],
    }
}

/// Returns the bytes of one side of a layer, one tensor after the other. Slots of removed tokens are zero.
pub(super) fn gathered(
    side: Vec<KvTensor>,
    outline: &Outline,
    kv_heads: usize,
) -> Result<Vec<Vec<u8>>, RuntimeError> {
    let mut tensors: Vec<Vec<u8>> = Vec::new();
    for (stored, SlotRange { slots, .. }) in side.into_iter().zip(&outline.slot_ranges) {
        let parts = match stored.part(0..slots.len()) {
            KvTensor::Float(numbers) => vec![read(numbers.try_into_data())?],
            KvTensor::Bytes { words, scales } => {
                vec![read(words.try_into_data())?, read(scales.try_into_data())?]
            }
        };
        for (index, part) in parts.iter().enumerate() {
            let bytes = part.as_bytes();
            let row = bytes.len() / (kv_heads * slots.len());
            if tensors.len() == index {
                tensors.push(vec![0; kv_heads * outline.slots() * row]);
            }
            for (head, bytes) in bytes.chunks_exact(slots.len() * row).enumerate() {
                let at = (head * outline.slots() + slots.start) * row;
                tensors[index][at..at + bytes.len()].copy_from_slice(bytes);
            }
        }
    }
    Ok(tensors)
}

/// Returns the state of a recurrent layer, by the names of its tensors.
pub(super) fn state(cache: &SequenceCache, layer: usize) -> Result<Vec<(String, TensorData)>, RuntimeError> {
    let mut tensors = Vec::new();
    if let Some(Some(state)) = cache.states().get(layer) {
        if let Some(memory) = &state.memory {
            tensors.push((format!("layers.{layer}.memory"), read(memory.clone().try_into_data())?));
        }
        if let Some(convolution) = &state.convolution {
            tensors.push((format!("layers.{layer}.convolution"), read(convolution.clone().try_into_data())?));
        }
    }
    Ok(tensors)
}

fn read<E: ToString>(data: Result<TensorData, E>) -> Result<TensorData, RuntimeError> {
    data.map_err(|error| RuntimeError::Readback { reason: error.to_string() })
}

pub(super) fn stored_dtype(dtype: DType) -> Result<Dtype, RuntimeError> {
    match dtype {
        DType::F64 => Ok(Dtype::F64),
        DType::F32 => Ok(Dtype::F32),
        _ => Err(RuntimeError::Readback { reason: format!("a recurrent state came back in {dtype:?}") }),
    }
}

/// Returns tokens as the bytes of a file.
pub(super) fn words(tokens: &[u32]) -> Vec<u8> {
    tokens.iter().flat_map(|token| token.to_le_bytes()).collect()
}

/// Reads the tokens of a file.
pub(super) fn tokens(file: &TensorFile, vocab: usize) -> Result<Vec<u32>, RuntimeError> {
    let bytes = file.tensor(TOKENS, Dtype::U32)?.data;
    let tokens: Vec<u32> = bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
    match tokens.iter().find(|token| **token as usize >= vocab) {
        Some(token) => Err(file.fault(TOKENS, format!("{token}, in a vocabulary of {vocab}")).into()),
        None => Ok(tokens),
    }
}

/// Returns keys and values: on the CPU they stay in the file, to other devices they are copied.
pub(super) fn mapped(
    file: &TensorFile,
    layout: &Layout,
    outline: &Outline,
) -> Result<MappedKv, RuntimeError> {
    let slots = outline.slots();
    let stored = |layer: usize, side: &Side| -> Result<KvTensor, StoreError> {
        let name = |suffix: &str| format!("layers.{layer}.{}{suffix}", side.name);
        let floats = |dtype, kind| -> Result<KvTensor, StoreError> {
            let shape = [side.heads, slots, side.width];
            let bytes = file.shaped(&name(""), dtype, &shape)?;
            Ok(KvTensor::Float(Tensor::from_data(data(bytes, shape, kind), (&layout.device, kind))))
        };
        match side.kv_type {
            KvType::F32 => floats(Dtype::F32, DType::F32),
            KvType::F16 => floats(Dtype::F16, DType::F16),
            KvType::Int8 => {
                let shape = [side.heads, slots, side.width.div_ceil(size_of::<i32>())];
                let words = data(file.shaped(&name(".words"), Dtype::I32, &shape)?, shape, DType::I32);
                let shape = [side.heads, slots];
                let scales = data(file.shaped(&name(".scales"), Dtype::F32, &shape)?, shape, DType::F32);
                Ok(KvTensor::Bytes {
                    words: Tensor::<3, Int>::from_data(words, (&layout.device, DType::I32)),
                    scales: Tensor::from_data(scales, (&layout.device, DType::F32)),
                })
            }
        }
    };
    let layers = layout.layers.iter().enumerate().map(|(index, layer)| {
        Ok(match &sides(layer, layout.kv_dtype)[..] {
            _ if slots == 0 => None,
            [keys, values] => {
                Some(LayerKv::Attention { keys: stored(index, keys)?, values: stored(index, values)? })
            }
            [rows] if matches!(layer, LayerLayout::Latents { .. }) => {
                Some(LayerKv::Latents(stored(index, rows)?))
            }
            [states] => Some(LayerKv::HiddenStates(stored(index, states)?)),
            _ => None,
        })
    });
    let layers: Result<_, StoreError> = layers.collect();
    Ok(MappedKv { layers: layers? })
}

/// Reads recurrent states, which are on the CPU for every device.
pub(super) fn states(
    file: &TensorFile,
    decoder: &Decoder,
) -> Result<Vec<Option<RecurrentState>>, RuntimeError> {
    let device = host_device(decoder.device());
    let memories = decoder.memories().iter().enumerate();
    let states = memories.map(|(index, memory)| match *memory {
        MixerMemory::State { memory, convolution } => {
            let name = |part: &str| format!("layers.{index}.{part}");
            Ok(Some(RecurrentState {
                memory: state_tensor(file, &name("memory"), memory, &device)?,
                convolution: state_tensor(file, &name("convolution"), convolution, &device)?,
            }))
        }
        MixerMemory::KeysAndValues { .. } | MixerMemory::Latents { .. } | MixerMemory::Shared { .. } => {
            Ok(None)
        }
    });
    // The states at the split come after the blocks.
    states.chain(decoder.split().map(|_| Ok(None))).collect()
}

fn state_tensor<const D: usize>(
    file: &TensorFile,
    name: &str,
    shape: Option<[usize; D]>,
    device: &Device,
) -> Result<Option<Tensor<D>>, RuntimeError> {
    let Some(shape) = shape else { return Ok(None) };
    let kind = match file.dtype(name) {
        None => return Ok(None),
        Some(Dtype::F64) => DType::F64,
        Some(_) => DType::F32,
    };
    let bytes = file.shaped(name, stored_dtype(kind)?, &shape)?;
    Ok(Some(Tensor::from_data(data(bytes, shape, kind), (device, kind))))
}

fn data<const D: usize>(bytes: bytes::Bytes, shape: [usize; D], dtype: DType) -> TensorData {
    TensorData::from_bytes(Bytes::from_shared(bytes, AllocationProperty::File), shape, dtype)
}
