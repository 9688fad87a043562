//! Experts of mixtures that are read when they are chosen, and the ones that stay.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use burn::tensor::Device;
use firebox_store::{Checkpoint, LoadedTensors, ReadAt, ReadObserver, Stream, StreamConfig, StreamReport};

use crate::ModelError;
use crate::config::{DecoderConfig, FeedForwardConfig};
use crate::gated::GatedFeedForward;
use crate::weights::Weights;

/// Passes after which a choice counts half.
const HALF_LIFE: f32 = 64.0;

/// The experts of a decoder's mixtures. Chosen experts are read; those that are chosen most often, and most recently, stay resident as
/// far as there is room.
#[derive(Debug)]
pub(crate) struct ExpertCache {
    stream: Stream,
    /// The index of each layer's first expert among all.
    first: HashMap<usize, usize>,
    config: DecoderConfig,
    device: Device,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Bytes that resident experts may take.
    room: u64,
    /// Bytes that they take.
    held: u64,
    /// The number of layers with experts.
    layers: usize,
    /// How often a layer with experts has run.
    time: u64,
    /// How often each expert was chosen, with a weight that decays, and the time of the last choice.
    heat: Vec<(f32, u64)>,
    resident: HashMap<usize, Arc<GatedFeedForward>>,
}

/// The prefix of the names of a block's experts, behind the block's own prefix.
pub(crate) const EXPERTS: &str = "mlp.experts.";

impl ExpertCache {
    /// Opens the cache of a decoder that has mixtures of experts.
    pub fn open(
        checkpoint: &Checkpoint,
        config: &DecoderConfig,
        device: &Device,
        disk: Arc<dyn ReadAt>,
        stream: StreamConfig,
    ) -> Result<Option<Self>, ModelError> {
        let mut first = HashMap::new();
        let mut units = Vec::new();
        for (layer, block) in config.blocks.iter().enumerate() {
            let FeedForwardConfig::MixtureOfExperts(mixture) = &block.feed_forward else { continue };
            first.insert(layer, units.len());
            let prefix = format!("{}{EXPERTS}", config.block_prefix(layer));
            let names = checkpoint.tensors().map(|info| info.name.as_str());
            let of_layer: Vec<&str> = names.filter(|name| name.starts_with(&prefix)).collect();
            for expert in 0..mixture.experts {
                let prefix = format!("{prefix}{expert}.");
                let names = of_layer.iter().copied().filter(|name| name.starts_with(&prefix));
                units.push(Arc::new(checkpoint.read_unit(names)?));
            }
        }
        if units.is_empty() {
            return Ok(None);
        }
        let count = units.len();
        let stream = Stream::new(disk, units, stream)?;
        // The next experts are unknown before the router has run.
        stream.read_ahead(0..0);
        let heat = vec![(0.0, 0); count];
        let layers = first.len();
        let state = State { room: 0, held: 0, layers, time: 0, heat, resident: HashMap::new() };
        Ok(Some(Self {
            stream,
            first,
            config: config.clone(),
            device: device.clone(),
            state: Mutex::new(state),
        }))
    }

    /// Sets how many bytes of experts may be resident.
    pub fn set_room(&self, room: u64) {
        let mut state = self.state();
        state.room = room;
        while state.held > room && state.evict_coldest(&self.stream, f32::INFINITY) {}
    }

    /// Bytes of resident experts.
    pub fn held(&self) -> u64 {
        self.state().held
    }

    /// Sets how many buffers there may be.
    pub fn set_buffers(&self, buffers: usize) {
        self.stream.set_buffers(buffers);
    }

    /// How many buffers there are.
    pub fn made_buffers(&self) -> usize {
        self.stream.made_buffers()
    }

    /// Waits until there are, and may be, fewer buffers than `count`, or until the time is over.
    pub fn wait_for_fewer_buffers(&self, count: usize, timeout: Duration) {
        self.stream.wait_for_fewer_buffers(count, timeout);
    }

    /// Bytes of one buffer: those of the largest expert.
    pub fn buffer_bytes(&self) -> usize {
        self.stream.buffer_bytes()
    }

    /// Sets the observer of reads.
    pub fn set_observer(&self, observer: Arc<dyn ReadObserver>) {
        self.stream.set_observer(observer);
    }

    /// What has been read.
    pub fn report(&self) -> StreamReport {
        self.stream.report()
    }

    /// Calls `work` with some experts of a layer in order, and reads the next ones meanwhile.
    pub fn each(
        &self,
        layer: usize,
        experts: &[usize],
        mut work: impl FnMut(usize, &GatedFeedForward),
    ) -> Result<(), ModelError> {
        let first = self.first[&layer];
        let found: Vec<_> = {
            let mut state = self.state();
            state.time += 1;
            experts.iter().map(|expert| state.find(first + expert)).collect()
        };
        let absent = experts.iter().zip(&found).filter(|(_, found)| found.is_none());
        let mut read = self.stream.request(absent.map(|(expert, _)| first + expert));
        for (&expert, found) in experts.iter().zip(&found) {
            match found {
                Some(network) => work(expert, network),
                None => {
                    // Uploads have to leave the buffers of the stream; what follows reports a lost device.
                    let _ = self.device.flush();
                    let Some(loaded) = read.next() else { unreachable!("every absent one was requested") };
                    let network = self.keep_or_build(layer, expert, loaded?)?;
                    work(expert, &network);
                }
            }
        }
        Ok(())
    }

    /// Builds an expert that was read, and keeps it if it is chosen often enough.
    fn keep_or_build(
        &self,
        layer: usize,
        expert: usize,
        loaded: LoadedTensors,
    ) -> Result<Arc<GatedFeedForward>, ModelError> {
        let index = self.first[&layer] + expert;
        if !self.state().make_room(index, &self.stream) {
            return self.build(layer, expert, &loaded);
        }
        let copy =
            loaded.copied().map_err(ModelError::from).and_then(|copy| self.build(layer, expert, &copy));
        let mut state = self.state();
        let network = match copy {
            Ok(network) if !state.resident.contains_key(&index) && state.held <= state.room => network,
            // Another thread was faster, or there is less room or memory by now.
            _ => {
                state.held -= self.stream.units()[index].buffer_bytes() as u64;
                drop(state);
                return self.build(layer, expert, &loaded);
            }
        };
        state.resident.insert(index, network.clone());
        Ok(network)
    }

    fn build(
        &self,
        layer: usize,
        expert: usize,
        loaded: &LoadedTensors,
    ) -> Result<Arc<GatedFeedForward>, ModelError> {
        let FeedForwardConfig::MixtureOfExperts(mixture) = &self.config.blocks[layer].feed_forward else {
            unreachable!("only mixtures have experts");
        };
        let taken = RefCell::default();
        let weights = Weights::new(loaded, &self.device, &taken);
        let weights = weights.within(&format!("{}{EXPERTS}{expert}.", self.config.block_prefix(layer)));
        GatedFeedForward::load(&mixture.expert, &weights).map(Arc::new)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Counts an expert as chosen. Returns it if it is resident.
    fn find(&mut self, index: usize) -> Option<Arc<GatedFeedForward>> {
        self.heat[index] = (self.heat_now(index) + 1.0, self.time);
        self.resident.get(&index).cloned()
    }

    fn heat_now(&self, index: usize) -> f32 {
        let (heat, at) = self.heat[index];
        let passes = (self.time - at) as f32 / self.layers as f32;
        heat * (-passes / HALF_LIFE).exp2()
    }

    /// Makes room for an expert and counts it as held, if evicting colder experts is enough.
    fn make_room(&mut self, index: usize, stream: &Stream) -> bool {
        let bytes = stream.units()[index].buffer_bytes() as u64;
        if bytes > self.room || self.resident.contains_key(&index) {
            return false;
        }
        let heat = self.heat_now(index);
        while self.held + bytes > self.room {
            if !self.evict_coldest(stream, heat) {
                return false;
            }
        }
        self.held += bytes;
        true
    }

    fn evict_coldest(&mut self, stream: &Stream, below: f32) -> bool {
        let heats = self.resident.keys().map(|&index| (self.heat_now(index), index));
        let coldest = heats.min_by(|a, b| a.0.total_cmp(&b.0)).filter(|(heat, _)| *heat < below);
        let Some((_, index)) = coldest else { return false };
        self.resident.remove(&index);
        self.held -= stream.units()[index].buffer_bytes() as u64;
        true
    }
}
