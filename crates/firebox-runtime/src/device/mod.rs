//! Devices by their names.

use burn::tensor::Device;

use crate::RuntimeError;

#[cfg(feature = "cuda")]
mod cuda;

/// Lists the devices that this build can compute on here, by the names that [`device`] takes.
pub fn available_devices() -> Vec<&'static str> {
    let mut names = vec!["cpu"];
    if cfg!(feature = "ndarray") {
        names.push("ndarray");
    }
    if cfg!(feature = "wgpu") {
        names.push("wgpu");
    }
    #[cfg(feature = "cuda")]
    if cuda::check(0).is_ok() {
        names.push("cuda");
    }
    names
}

/// Returns the device of a name: `cpu` (also `flex`), `ndarray`, `wgpu` or `cuda`, the latter two with an index after
/// a colon if there are several.
pub fn device(name: &str) -> Result<Device, RuntimeError> {
    let unavailable = || RuntimeError::Device { name: name.into(), available: available_devices() };
    let (kind, index) = match name.split_once(':') {
        Some((kind, index)) => (kind, Some(index.parse::<usize>().map_err(|_| unavailable())?)),
        None => (name, None),
    };
    match (kind, index) {
        ("cpu" | "flex", None) => Ok(Device::flex()),
        #[cfg(feature = "ndarray")]
        #[allow(deprecated)] // Kept as the third opinion in tests of backends.
        ("ndarray", None) => Ok(Device::ndarray()),
        #[cfg(feature = "wgpu")]
        ("wgpu", None) => Ok(Device::wgpu(burn::tensor::DeviceKind::DefaultDevice)),
        #[cfg(feature = "wgpu")]
        ("wgpu", Some(index)) => Ok(Device::wgpu(burn::tensor::DeviceKind::DiscreteGpu(index))),
        #[cfg(feature = "cuda")]
        ("cuda", index) => {
            let index = index.unwrap_or(0);
            cuda::check(index).map_err(|reason| RuntimeError::DeviceMissing { name: name.into(), reason })?;
            Ok(Device::cuda(index))
        }
        _ => Err(unavailable()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_device_lists_the_known() {
        let error = device("abacus").unwrap_err().to_string();
        assert!(error.contains("abacus") && error.contains("cpu"), "{error}");
        assert!(device("cpu:1").is_err());
    }

    #[test]
    fn every_available_device_opens() {
        for name in available_devices() {
            assert!(device(name).is_ok(), "{name}");
        }
    }
}
