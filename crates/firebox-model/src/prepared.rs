//! Weights prepared for products on first use.

use std::sync::OnceLock;

use burn::module::{
    Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor,
};
use burn::tensor::Device;
use firebox_kernels::linear::{PreparedWeight, Weight};

/// A weight prepared for products, computed at the first product and dropped when its tensors change.
#[derive(Debug, Clone, Default)]
pub(crate) struct LazyPreparedWeight(OnceLock<Option<PreparedWeight>>);

impl LazyPreparedWeight {
    pub fn get_or_prepare(&self, weight: impl FnOnce() -> Weight) -> Option<&PreparedWeight> {
        // Not within the lock: preparation may wait for other threads, and a waiting thread may come here
        // with a product of its own. The first result is kept.
        if self.0.get().is_none() {
            let _ = self.0.set(weight().prepare());
        }
        self.0.get().and_then(Option::as_ref)
    }
}

impl Module for LazyPreparedWeight {
    fn visit<V: ModuleVisitor>(&self, _visitor: &mut V) {}

    fn map<M: ModuleMapper>(self, _mapper: &mut M) -> Self {
        Self::default()
    }

    fn to_device(self, _device: &Device) -> Self {
        Self::default()
    }

    fn fork(self, _device: &Device) -> Self {
        Self::default()
    }

    fn collect_devices(&self, devices: Devices) -> Devices {
        devices
    }

    fn materialize(self) -> Self {
        Self::default()
    }

    fn valid(&self) -> Self {
        Self::default()
    }

    fn train(self) -> Self {
        Self::default()
    }
}

impl ModuleDisplayDefault for LazyPreparedWeight {
    fn content(&self, _content: Content) -> Option<Content> {
        None
    }
}

impl ModuleDisplay for LazyPreparedWeight {}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};
    use std::time::Duration;

    use burn::tensor::Tensor;

    use super::*;

    #[test]
    fn preparation_may_reenter() {
        let weight = || Weight::Dense(Tensor::ones([2, 3], &Device::flex()));
        let (done, is_done) = mpsc::channel();
        let prepared = Arc::new(LazyPreparedWeight::default());
        let made = prepared.clone();
        std::thread::spawn(move || {
            let outer = made.get_or_prepare(|| {
                assert!(made.get_or_prepare(weight).is_some());
                weight()
            });
            done.send(outer.is_some()).unwrap();
        });
        assert!(is_done.recv_timeout(Duration::from_secs(60)).unwrap());
        assert!(prepared.get_or_prepare(|| unreachable!("it is ready")).is_some());
    }
}
