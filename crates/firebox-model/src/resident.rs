//! Weights that are in memory as a whole.

use std::cell::RefCell;
use std::sync::Arc;

use burn::tensor::Device;
use firebox_store::{Checkpoint, ReadMethod};

use crate::ModelError;
use crate::block::Block;
use crate::config::{DecoderConfig, TensorNames};
use crate::layer_inputs::DiskRows;
use crate::matrix::Matrix;
use crate::slot::Slot;
use crate::weights::Weights;

/// The weights of a decoder that are all in memory: slices of mapped files on devices that share the machine's memory, copies on others.
#[derive(Debug, Clone)]
pub(crate) struct ResidentWeights {
    checkpoint: Checkpoint,
    pub embedding: Arc<Matrix>,
    /// Empty for an evicted block that was not used since.
    blocks: Vec<Slot<Block>>,
    /// The embedding, where both are tied.
    pub unembedding: Arc<Matrix>,
}

impl ResidentWeights {
    pub fn load(
        checkpoint: &Checkpoint,
        config: &DecoderConfig,
        root: &Weights<'_>,
    ) -> Result<Self, ModelError> {
        let DecoderConfig { vocab_size, hidden_size, .. } = *config;
        let blocks = (0..config.blocks.len())
            .map(|index| config.load_block(index, root).map(Slot::from))
            .collect::<Result<_, _>>()?;
        let embedding = Arc::new(root.matrix(&config.embedding_name(), vocab_size, hidden_size)?);
        let unembedding = if config.tied_embeddings {
            embedding.clone()
        } else {
            Arc::new(root.matrix(&config.unembedding_name(), vocab_size, hidden_size)?)
        };
        Ok(Self { checkpoint: checkpoint.clone(), embedding, blocks, unembedding })
    }

    /// Rows of a matrix that is never in memory.
    pub fn rows(&self, name: String) -> DiskRows {
        let disk = self.checkpoint.disk(ReadMethod::Buffered);
        DiskRows { checkpoint: self.checkpoint.clone(), name, disk }
    }

    /// A block, built again if it was evicted.
    pub fn block(
        &self,
        index: usize,
        config: &DecoderConfig,
        device: &Device,
    ) -> Result<Arc<Block>, ModelError> {
        if let Some(block) = self.blocks[index].get() {
            return Ok(block);
        }
        let taken = RefCell::default();
        let block = config.load_block(index, &Weights::new(&self.checkpoint, device, &taken))?;
        Ok(self.blocks[index].fill(Arc::new(block)))
    }

    /// Replaces a block. All other weights are shared.
    pub fn with_block(&self, index: usize, block: Block) -> Self {
        let mut whole = self.clone();
        whole.blocks[index] = block.into();
        whole
    }

    /// Evicts the blocks from `first` on that can be built from the checkpoint again.
    pub fn evict_from(&self, first: usize) {
        for slot in self.blocks.iter().skip(first) {
            if slot.get().is_some_and(|block| block.is_original()) {
                slot.set(None);
            }
        }
    }
}

impl DecoderConfig {
    pub(crate) fn embedding_name(&self) -> String {
        format!("{}{}.weight", self.names.prefix, self.names.embedding)
    }

    /// The embedding's name, where both are tied.
    pub(crate) fn unembedding_name(&self) -> String {
        if self.tied_embeddings { self.embedding_name() } else { self.own_unembedding_name() }
    }

    /// The prefix of the names of a block's tensors.
    pub(crate) fn block_prefix(&self, index: usize) -> String {
        format!("{}{}.{index}.", self.names.prefix, self.names.layers)
    }

    /// Builds a block from tensors with their full names.
    pub(crate) fn load_block(&self, index: usize, root: &Weights<'_>) -> Result<Block, ModelError> {
        Block::load(&self.blocks[index], &self.block_weights(index, root), None)
    }

    /// Returns the tensors of a block under the names that modules have for them.
    pub(crate) fn block_weights<'a>(&self, index: usize, root: &Weights<'a>) -> Weights<'a> {
        let TensorNames { renamed, transposed, .. } = self.names;
        root.within(&self.block_prefix(index)).laid_out(renamed, transposed)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::decoder::decoder_config;

    #[test]
    fn an_evicted_block_is_built_again() {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/reference/llama");
        let checkpoint = Checkpoint::open(fixture).unwrap();
        let (config, device) = (decoder_config(checkpoint.config()).unwrap(), Device::flex());
        let taken = RefCell::default();
        let root = Weights::new(&checkpoint, &device, &taken);
        let whole = ResidentWeights::load(&checkpoint, &config, &root).unwrap();
        let there = |whole: &ResidentWeights| whole.blocks.iter().filter(|slot| slot.get().is_some()).count();
        let layers = config.blocks.len();
        assert_eq!(there(&whole), layers);
        whole.evict_from(1);
        assert_eq!(there(&whole), 1);
        let built = whole.block(1, &config, &device).unwrap();
        assert!(Arc::ptr_eq(&built, &whole.block(1, &config, &device).unwrap()), "it stays");
        assert_eq!(there(&whole), 2);
    }
}
