//! The parts in which a decoder's weights are read.

use std::ops::Range;
use std::sync::Arc;

use firebox_store::{Checkpoint, ReadUnit, SegmentId, TILE_ROWS};

use crate::ModelError;
use crate::config::{BlockConfig, DecoderConfig, FeedForwardConfig};
use crate::expert_cache::EXPERTS;

/// A decoder's weights in parts: its blocks, each in one or a few pieces, then its unembedding in blocks of rows. The embedding is no
/// part, because only the rows of the tokens at hand are read.
#[derive(Debug, Clone)]
pub struct Partition {
    /// What a pass reads of each part: blocks without their experts, and rows of the unembedding.
    pub units: Vec<Arc<ReadUnit>>,
    /// Blocks with all of their experts.
    pub whole: Vec<Arc<ReadUnit>>,
    /// The parts of each block.
    pub blocks: Vec<Range<usize>>,
}

impl Partition {
    /// Partitions a checkpoint of that configuration, with one part a block.
    pub fn of(checkpoint: &Checkpoint, config: &DecoderConfig) -> Result<Self, ModelError> {
        Self::in_pieces(checkpoint, config, 1)
    }

    /// Partitions a checkpoint with at most so many pieces a block, as its tensors can be divided. Blocks with experts stay whole.
    pub fn in_pieces(
        checkpoint: &Checkpoint,
        config: &DecoderConfig,
        pieces: usize,
    ) -> Result<Self, ModelError> {
        if config.blocks.is_empty() {
            let reason = "no layers; there is nothing to stream".into();
            return Err(ModelError::Config { field: "num_hidden_layers".into(), reason });
        }
        let is_mixture =
            |block: &BlockConfig| matches!(block.feed_forward, FeedForwardConfig::MixtureOfExperts(_));
        let pieces = if config.blocks.iter().any(is_mixture) { 1 } else { pieces };
        let (mut units, mut whole, mut blocks) = (Vec::new(), Vec::new(), Vec::new());
        for index in 0..config.blocks.len() {
            let prefix = config.block_prefix(index);
            let names: Vec<&str> = checkpoint
                .tensors()
                .map(|info| info.name.as_str())
                .filter(|name| name.starts_with(&prefix) && !config.is_foreign(name))
                .collect();
            let is_expert = |name: &str| name[prefix.len()..].starts_with(EXPERTS);
            whole.push(Arc::new(checkpoint.read_unit(names.iter().copied())?));
            let first = units.len();
            let others = names.into_iter().filter(|name| !is_expert(name));
            units.extend(checkpoint.divided(others, pieces)?.into_iter().map(Arc::new));
            blocks.push(first..units.len());
        }
        // At most as large as the largest block, so that they fit into the same buffers.
        let largest = units.iter().map(|unit| unit.bytes()).max().unwrap_or(0);
        let unembedding = config.unembedding_name();
        for rows in row_blocks(checkpoint, &unembedding, config.vocab_size, largest) {
            units.push(Arc::new(checkpoint.rows(&unembedding, rows)?));
        }
        Ok(Self { units, whole, blocks })
    }

    /// Bytes of memory that a part takes while it is resident, experts included.
    pub fn part_bytes(&self, part: usize) -> u64 {
        let block = self.blocks.binary_search_by_key(&part, |pieces| pieces.start);
        let whole = block.ok().filter(|block| self.blocks[*block].len() == 1).map(|block| &self.whole[block]);
        whole.unwrap_or_else(|| &self.units[part]).buffer_bytes() as u64
    }

    /// The number of parts that belong to blocks.
    pub fn block_parts(&self) -> usize {
        self.blocks.last().map_or(0, |pieces| pieces.end)
    }

    /// The block that a part belongs to, unless it belongs to the unembedding.
    pub fn block_of(&self, part: usize) -> Option<usize> {
        let block = self.blocks.partition_point(|pieces| pieces.end <= part);
        (block < self.blocks.len()).then_some(block)
    }
}

/// Divides the rows of a matrix into as few blocks of equal size, of whole tiles, as have at most `most` bytes each.
fn row_blocks(
    checkpoint: &Checkpoint,
    name: &str,
    rows: usize,
    most: u64,
) -> impl Iterator<Item = Range<usize>> {
    let bytes = checkpoint.info(name).map_or(0, |info| info.bytes);
    let blocks = bytes.div_ceil(most.max(1)).clamp(1, rows.max(1) as u64);
    let largest = (most * rows as u64 / bytes.max(1)) as usize / TILE_ROWS * TILE_ROWS;
    let each = rows.div_ceil(blocks as usize).next_multiple_of(TILE_ROWS).min(largest.max(TILE_ROWS));
    (0..rows).step_by(each).map(move |start| start..rows.min(start + each))
}

/// Returns the segments of a checkpoint that a pass reads as a whole, each with the layer that needs it, in the order of
/// layers.
pub fn segments_by_layer(checkpoint: &Checkpoint, config: &DecoderConfig) -> Vec<(usize, SegmentId)> {
    let last = config.blocks.len().saturating_sub(1);
    let unembedding = if config.tied_embeddings { SegmentId::Embed } else { SegmentId::Final };
    let segments = checkpoint.segments().into_iter().filter_map(|segment| match segment.id {
        SegmentId::Layer(layer) => Some((layer, segment.id)),
        id if id == unembedding => Some((last, id)),
        // A pass reads only a few rows of an embedding or a table.
        _ => None,
    });
    let mut segments: Vec<_> = segments.collect();
    segments.sort_by_key(|(layer, _)| *layer);
    segments
}
