use crate::{KvCache, RecurrentState};

/// What one layer remembers of a sequence.
#[derive(Debug, Clone)]
pub enum LayerCache {
    /// Keys and values of every position so far.
    Attention(KvCache),
    /// State of constant size.
    Recurrent(RecurrentState),
}

impl LayerCache {
    /// The keys and values, where this layer attends.
    pub fn attention(&mut self) -> Option<&mut KvCache> {
        match self {
            Self::Attention(cache) => Some(cache),
            Self::Recurrent(_) => None,
        }
    }

    /// The state, where this layer is recurrent.
    pub fn recurrent(&mut self) -> Option<&mut RecurrentState> {
        match self {
            Self::Recurrent(state) => Some(state),
            Self::Attention(_) => None,
        }
    }
}

/// What a model remembers of one sequence, layer by layer.
#[derive(Debug, Clone)]
pub struct SequenceCache {
    layers: Vec<LayerCache>,
    len: usize,
}

impl SequenceCache {
    /// A cache of the given layers, for a sequence that has not begun.
    pub fn new(layers: Vec<LayerCache>) -> Self {
        Self { layers, len: 0 }
    }

    /// Tokens whose pass through all layers is complete.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no token has passed yet.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The cache of one layer.
    ///
    /// # Panics
    /// If the model has no such layer.
    pub fn layer(&mut self, index: usize) -> &mut LayerCache {
        &mut self.layers[index]
    }

    /// Counts tokens that have passed through all layers.
    pub fn advance(&mut self, tokens: usize) {
        self.len += tokens;
    }

    /// Forgets everything; what was reserved stays reserved.
    pub fn clear(&mut self) {
        self.len = 0;
        for layer in &mut self.layers {
            match layer {
                LayerCache::Attention(cache) => cache.truncate(0),
                LayerCache::Recurrent(state) => *state = RecurrentState::default(),
            }
        }
    }

    /// Goes back to the first `len` tokens. Returns whether that was possible: a recurrent state cannot
    /// be unwound, so sequences of models that have one only go back to their beginning.
    pub fn rewind(&mut self, len: usize) -> bool {
        // A pass that failed between two layers has left more in some of them than was counted.
        let whole = self.layers.iter().all(|layer| match layer {
            LayerCache::Attention(cache) => cache.len() == self.len,
            LayerCache::Recurrent(_) => true,
        });
        if len > self.len || (len == self.len && whole) {
            return len == self.len;
        }
        if len == 0 {
            self.clear();
            return true;
        }
        if self.layers.iter().any(|layer| matches!(layer, LayerCache::Recurrent(_))) {
            return false;
        }
        for layer in &mut self.layers {
            if let LayerCache::Attention(cache) = layer {
                cache.truncate(len);
            }
        }
        self.len = len;
        true
    }

    /// Bytes reserved for attention keys and values.
    pub fn bytes(&self) -> usize {
        self.layers
            .iter()
            .map(|layer| match layer {
                LayerCache::Attention(cache) => cache.bytes(),
                LayerCache::Recurrent(_) => 0,
            })
            .sum()
    }
}
