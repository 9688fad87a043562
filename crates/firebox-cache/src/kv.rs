use burn::tensor::{DType, Device, Tensor};

/// Positions are reserved in multiples of this, so that a decoding loop reallocates once in a while
/// instead of at every token.
const RESERVE_STEP: usize = 256;

/// What keys and values are kept in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KvType {
    /// As they were computed.
    #[default]
    F32,
    /// Rounded to half precision: half the memory, and half the reading at every token.
    F16,
}

impl KvType {
    fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::F16 => DType::F16,
        }
    }
}

/// Keys and values of one attention layer, `[kv_heads, positions, head_dim]`, appended in place.
#[derive(Debug, Clone)]
pub struct KvCache {
    kept: KvType,
    keys: Option<Tensor<3>>,
    values: Option<Tensor<3>>,
    len: usize,
}

impl KvCache {
    /// A cache that holds no position yet and allocates nothing.
    pub fn new(kept: KvType) -> Self {
        Self { kept, keys: None, values: None, len: 0 }
    }

    /// How many positions are held.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no position is held.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// How many positions fit before the next reallocation.
    pub fn capacity(&self) -> usize {
        self.keys.as_ref().map_or(0, |keys| keys.dims()[1])
    }

    /// Appends positions; both tensors are `[kv_heads, new positions, head_dim]`.
    pub fn append(&mut self, keys: Tensor<3>, values: Tensor<3>) {
        let added = keys.dims()[1];
        if added == 0 {
            return;
        }
        let (at, dtype) = (self.len, self.kept.dtype());
        self.len += added;
        self.keys = Some(extend(self.keys.take(), keys.cast(dtype), at));
        self.values = Some(extend(self.values.take(), values.cast(dtype), at));
    }

    /// Keys and values of the positions from `start` on, or nothing when there are none.
    pub fn from_position(&self, start: usize) -> Option<(Tensor<3>, Tensor<3>)> {
        if start >= self.len {
            return None;
        }
        let view = |held: &Option<Tensor<3>>| {
            held.clone().map(|tensor| tensor.slice_dim(1, start as i64..self.len as i64))
        };
        view(&self.keys).zip(view(&self.values))
    }

    /// Forgets every position from `len` on.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Bytes reserved for keys and values together.
    pub fn bytes(&self) -> usize {
        [&self.keys, &self.values]
            .into_iter()
            .flatten()
            .map(|t| t.shape().num_elements() * t.dtype().size())
            .sum()
    }
}

/// Writes `added` at position `at`, reallocating when the buffer is too small. `held` arrives by value:
/// the write happens in place only while nobody else holds the buffer.
fn extend(held: Option<Tensor<3>>, added: Tensor<3>, at: usize) -> Tensor<3> {
    let [heads, new, width] = added.dims();
    let needed = at + new;
    let buffer = match held {
        Some(buffer) if buffer.dims()[1] >= needed => buffer,
        held => {
            let capacity = grown(held.as_ref().map_or(0, |t| t.dims()[1]), needed);
            let fresh = zeros([heads, capacity, width], added.dtype(), &added.device());
            match held {
                Some(old) if at > 0 => {
                    let kept = old.slice_dim(1, 0..at as i64);
                    fresh.slice_assign([0..heads, 0..at, 0..width], kept)
                }
                _ => fresh,
            }
        }
    };
    buffer.slice_assign([0..heads, at..needed, 0..width], added)
}

fn grown(capacity: usize, needed: usize) -> usize {
    needed.max(capacity + capacity / 2).div_ceil(RESERVE_STEP) * RESERVE_STEP
}

fn zeros(shape: [usize; 3], dtype: DType, device: &Device) -> Tensor<3> {
    Tensor::zeros(shape, (device, dtype))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(from: usize, count: usize) -> Tensor<3> {
        let values: Vec<f32> = (0..2 * count * 3).map(|i| (from * 100 + i) as f32).collect();
        Tensor::<1>::from_floats(values.as_slice(), &Device::flex()).reshape([2, count, 3])
    }

    #[test]
    fn appending_in_pieces_equals_concatenation() {
        let pieces = [5usize, 1, 300, 7, 1, 260];
        let mut cache = KvCache::new(KvType::F32);
        let mut plain = Vec::new();
        for (i, &count) in pieces.iter().enumerate() {
            cache.append(rows(i, count), rows(i, count).neg());
            plain.push(rows(i, count));
        }
        let expected = Tensor::cat(plain, 1);
        assert_eq!(cache.len(), pieces.iter().sum::<usize>());
        let (keys, values) = cache.from_position(0).unwrap();
        keys.into_data().assert_eq(&expected.clone().into_data(), true);
        values.neg().into_data().assert_eq(&expected.clone().into_data(), true);
        let (tail, _) = cache.from_position(4).unwrap();
        tail.into_data().assert_eq(&expected.slice_dim(1, 4..cache.len() as i64).into_data(), true);
    }

    #[test]
    fn half_precision_takes_half_the_memory() {
        let added = rows(3, 70).div_scalar(7.0);
        let [exact, rounded] = [KvType::F32, KvType::F16].map(|kept| {
            let mut cache = KvCache::new(kept);
            cache.append(added.clone(), added.clone());
            cache
        });
        assert_eq!(exact.bytes(), 2 * rounded.bytes());
        let (keys, values) = rounded.from_position(0).unwrap();
        let expected = added.cast(DType::F16).into_data();
        keys.into_data().assert_eq(&expected, true);
        values.into_data().assert_eq(&expected, true);
    }

    #[test]
    fn truncated_positions_are_overwritten() {
        let mut cache = KvCache::new(KvType::F32);
        cache.append(rows(0, 6), rows(0, 6));
        cache.truncate(2);
        cache.append(rows(9, 1), rows(9, 1));
        let expected = Tensor::cat(vec![rows(0, 6).slice_dim(1, 0..2), rows(9, 1)], 1);
        cache.from_position(0).unwrap().0.into_data().assert_eq(&expected.into_data(), true);
        assert!(cache.from_position(3).is_none());
    }
}
