//! Turns a core module into a component, as described by the WIT that the SDK embedded in the module.

use anyhow::{Context as _, Result, bail};
use wit_component::ComponentEncoder;

/// Wraps `module` and validates the result. Bytes that are already a component are returned unchanged.
pub fn encode(module: &[u8]) -> Result<Vec<u8>> {
    match module.get(..8) {
        Some([0, b'a', b's', b'm', 1, 0, 0, 0]) => {}
        Some([0, b'a', b's', b'm', _, _, 1, 0]) => return Ok(module.to_vec()),
        _ => bail!("this is not a WebAssembly binary"),
    }
    ComponentEncoder::default()
        .validate(true)
        .module(module)
        .context("cannot read the module's embedded WIT; was it built with the same SDK as this `skep`?")?
        .encode()
        .context("an agent may import only what the package `skep:agent` offers; look for a dependency that needs more")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn component_passes_through_and_other_bytes_are_refused() {
        let component = [0, b'a', b's', b'm', 0x0d, 0, 1, 0];
        assert_eq!(encode(&component).expect("already a component"), component);
        assert!(encode(b"#!/bin/sh").is_err());
        assert!(encode(b"").is_err());
    }
}
