//! What a machine needs for the device `cuda`.

use std::env;
use std::path::{Path, PathBuf};

use burn::tensor::{Device, DeviceType};

/// Where CubeCL looks for a CUDA toolkit if `CUDA_PATH` names none.
const TOOLKITS: [&str; 4] = ["/usr/local/cuda", "/opt/cuda", "/usr/lib/cuda", "/usr"];
/// NVIDIA's functions such as `exp`, which are linked into kernels.
const LIBDEVICE: &str = "nvvm/libdevice/libdevice.10.bc";

/// Checks that the machine has this GPU and what its kernels are compiled with. CubeCL would panic at the first tensor,
/// or report the kernel at the first result that is read. Returns what is missing, and what to do about it.
pub fn check(index: usize) -> Result<(), String> {
    let gpus = Device::enumerate(DeviceType::Cuda).len();
    if gpus == 0 {
        return Err(
            "NVIDIA's driver (libcuda.so.1) and a GPU that it sees were not found; `nvidia-smi` says what \
                    the driver sees, and the device `wgpu` needs no more than Vulkan"
                .into(),
        );
    }
    if index >= gpus {
        return Err(format!("the driver sees {gpus} GPUs, which are counted from 0"));
    }
    let roots = toolkits(env::var_os("CUDA_PATH").map(PathBuf::from));
    if has_libdevice(&roots) {
        return Ok(());
    }
    let roots: Vec<_> = roots.iter().map(|root| root.display().to_string()).collect();
    Err(format!(
        "{LIBDEVICE} is not in {}; install the CUDA toolkit, or pip's nvidia-nvvm, and set CUDA_PATH to the \
         directory that has nvvm",
        roots.join(", ")
    ))
}

fn toolkits(named: Option<PathBuf>) -> Vec<PathBuf> {
    named.map_or_else(|| TOOLKITS.map(PathBuf::from).into(), |root| vec![root])
}

/// Whether kernels will find the file. CubeCL takes the first directory that has a place for it, and looks no further.
fn has_libdevice(roots: &[PathBuf]) -> bool {
    let place = Path::new(LIBDEVICE).parent().unwrap_or(Path::new(""));
    roots
        .iter()
        .find(|root| roots.len() == 1 || root.join(place).is_dir())
        .is_some_and(|root| root.join(LIBDEVICE).is_file())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_first_toolkit_with_a_place_for_libdevice_decides() {
        let folder = tempfile::tempdir().unwrap();
        let roots = ["without", "empty", "whole"].map(|name| folder.path().join(name));
        let place = |root: &Path| root.join("nvvm/libdevice");
        fs::create_dir_all(&roots[0]).unwrap();
        fs::create_dir_all(place(&roots[1])).unwrap();
        fs::create_dir_all(place(&roots[2])).unwrap();
        fs::write(roots[2].join(LIBDEVICE), b"").unwrap();
        assert!(!has_libdevice(&roots));
        fs::remove_dir_all(&roots[1]).unwrap();
        assert!(has_libdevice(&roots));
        assert!(has_libdevice(&roots[2..]) && !has_libdevice(&roots[..1]));
    }

    #[test]
    fn a_named_toolkit_is_the_only_one() {
        assert_eq!(toolkits(Some("/here".into())), [PathBuf::from("/here")]);
        assert_eq!(toolkits(None).len(), TOOLKITS.len());
    }

    #[test]
    fn a_gpu_beyond_the_last_is_missing() {
        let error = check(usize::MAX).unwrap_err();
        assert!(error.contains("GPU"), "{error}");
    }
}
