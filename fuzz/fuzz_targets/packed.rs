//! A packed safetensors model, `config.json` and the weights with a zero byte between: what is listed can be unpacked or is
//! refused.
#![no_main]

use std::fs;

use firebox_store::Checkpoint;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some(at) = input.iter().position(|byte| *byte == 0) else { return };
    let folder = std::env::temp_dir().join(format!("firebox-fuzz-packed-{}", std::process::id()));
    if fs::create_dir_all(&folder).is_err() {
        return;
    }
    // A new file each time, because the last one may still be mapped.
    let weights = folder.join("model.safetensors");
    let _ = fs::remove_file(&weights);
    if fs::write(folder.join("config.json"), &input[..at]).is_err()
        || fs::write(&weights, &input[at + 1..]).is_err()
    {
        return;
    }
    let Ok(model) = Checkpoint::open_listing(&folder) else { return };
    for info in model.tensors() {
        if let Ok(weight) = model.weight(&info.name) {
            assert_eq!(weight.to_f32().map(|values| values.len()).ok(), Some(info.shape.iter().product()));
        }
    }
});
