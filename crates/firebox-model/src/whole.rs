use std::sync::Arc;

use crate::ModelError;
use crate::block::Block;
use crate::config::DecoderConfig;
use crate::matrix::Matrix;
use crate::weights::Weights;

/// The weights of a decoder, all of them there: over mapped files on devices that share the machine's memory, in their
/// own memory on others.
#[derive(Debug, Clone)]
pub(crate) struct Whole {
    pub embedding: Arc<Matrix>,
    pub blocks: Vec<Arc<Block>>,
    /// The embedding, where that serves.
    pub unembedding: Arc<Matrix>,
}

impl Whole {
    pub fn load(config: &DecoderConfig, root: &Weights<'_>) -> Result<Self, ModelError> {
        let DecoderConfig { vocab_size, hidden_size, .. } = *config;
        let blocks = (0..config.blocks.len())
            .map(|index| config.load_block(index, root).map(Arc::new))
            .collect::<Result<_, _>>()?;
        let embedding = Arc::new(root.matrix(&config.embedding_name(), vocab_size, hidden_size)?);
        let unembedding = if config.tied_embeddings {
            embedding.clone()
        } else {
            Arc::new(root.matrix(&config.unembedding_name(), vocab_size, hidden_size)?)
        };
        Ok(Self { embedding, blocks, unembedding })
    }
}

impl DecoderConfig {
    pub(crate) fn embedding_name(&self) -> String {
        format!("{}embed_tokens.weight", self.names.prefix)
    }

    /// The embedding's, where that serves.
    pub(crate) fn unembedding_name(&self) -> String {
        if self.tied_embeddings { self.embedding_name() } else { self.own_unembedding_name() }
    }

    /// What the names of a block's tensors begin with.
    pub(crate) fn block_prefix(&self, index: usize) -> String {
        format!("{}layers.{index}.", self.names.prefix)
    }

    /// Builds a block over tensors under their full names.
    pub(crate) fn load_block(&self, index: usize, root: &Weights<'_>) -> Result<Block, ModelError> {
        Block::load(&self.blocks[index], &root.within(&self.block_prefix(index)))
    }
}
