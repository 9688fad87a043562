//! The parts in which a decoder's weights are read.

use std::ops::Range;
use std::sync::Arc;

use firebox_store::{Checkpoint, Encoding, ReadUnit, SegmentId, TILE_ROWS};

use crate::ModelError;
use crate::config::{BlockConfig, DecoderConfig, FeedForwardConfig, LatentAttentionConfig, MixerConfig};
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
    /// Bytes of each block that are in memory beside those of the file.
    copies: Vec<u64>,
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
        let copies = (config.blocks.iter().enumerate())
            .map(|(index, block)| match &block.mixer {
                MixerConfig::LatentAttention(attention) => {
                    copies_of_factors(checkpoint, &config.block_prefix(index), attention)
                }
                _ => 0,
            })
            .collect();
        Ok(Self { units, whole, blocks, copies })
    }

    /// Bytes of memory that a part takes while it is resident, experts included.
    pub fn part_bytes(&self, part: usize) -> u64 {
        let block = self.blocks.binary_search_by_key(&part, |pieces| pieces.start).ok();
        let copies = block.map_or(0, |block| self.copies[block]);
        let whole = block.filter(|block| self.blocks[*block].len() == 1).map(|block| &self.whole[block]);
        whole.unwrap_or_else(|| &self.units[part]).buffer_bytes() as u64 + copies
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

/// Returns the bytes of what latent attention makes of the matrices that heads multiply latents by: it unpacks packed ones, and
/// transposes the part of keys where both parts are one matrix.
fn copies_of_factors(checkpoint: &Checkpoint, prefix: &str, attention: &LatentAttentionConfig) -> u64 {
    let &LatentAttentionConfig { heads, rank, plain_dim, value_dim, separate_factors, .. } = attention;
    let bytes = |name: &str, numbers: usize| {
        let info = checkpoint.info(&format!("{prefix}self_attn.{name}.weight"));
        let packed = info.is_some_and(|info| !matches!(info.encoding, Encoding::Plain(_)));
        if packed { numbers * size_of::<f32>() } else { 0 }
    };
    let (keys, values) = (heads * rank * plain_dim, heads * rank * value_dim);
    let copies = match separate_factors {
        true => bytes("k_b_proj", keys) + bytes("v_b_proj", values),
        false => bytes("kv_b_proj", keys + values) + keys * size_of::<f32>(),
    };
    copies as u64
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
