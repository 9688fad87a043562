//! Opens models and devices that the command line names.

use std::path::Path;

use firebox_runtime::residency::ResidencyOptions;
use firebox_runtime::{Cores, Device, Model};

use crate::compute::DeviceArgs;
use crate::console::Console;
use crate::fitting::say_fit;
use crate::hub;

/// Opens a model that a command line names.
pub fn open(name: &Path, device: &DeviceArgs, console: &Console) -> anyhow::Result<Model> {
    open_fitted(name, device, None, console)
}

/// Opens a model within the memory that `fit` names, or plainly without one.
pub fn open_fitted(
    name: &Path,
    device: &DeviceArgs,
    limit: Option<&ResidencyOptions>,
    console: &Console,
) -> anyhow::Result<Model> {
    let path = hub::resolve(name)?;
    let opened = opened_device(device)?;
    let began = std::time::Instant::now();
    let model = match limit {
        Some(limit) => Model::open_within(&path, &opened, limit)?,
        None => Model::open(&path, &opened)?,
    };
    say_fit(&model, console);
    console.detail(format!("opened {} in {:.2} s", path.display(), began.elapsed().as_secs_f64()));
    Ok(model)
}

/// Opens the device that the command line names and sets up its threads.
pub fn opened_device(args: &DeviceArgs) -> anyhow::Result<Device> {
    opened_device_on(args, &Cores::All)
}

/// Opens the device that the command line names, and sets up its threads on these cores.
pub fn opened_device_on(args: &DeviceArgs, cores: &Cores) -> anyhow::Result<Device> {
    let device = firebox_runtime::device(&args.device)?;
    if args.threads.is_some() || *cores != Cores::All {
        // Fails if the pool exists already: something computed before these settings were read.
        cores.start_threads(args.threads.map(usize::from))?;
    }
    Ok(device)
}
