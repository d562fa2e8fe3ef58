//! Where a guest stopped: the functions that it was in, by the names that its component has kept.

use crate::capability::log::cut;
use std::fmt::Write;
use wasmtime::WasmBacktrace;

/// The innermost functions; those that have no name are not among them.
const MAX_FRAMES: usize = 12;
const MAX_NAME_BYTES: usize = 120;

/// `pick, from choose, from run`: the innermost function first. `None` if none has a name.
pub(super) fn named(error: &wasmtime::Error) -> Option<String> {
    let frames = error.downcast_ref::<WasmBacktrace>()?.frames();
    let mut named = String::new();
    for name in frames.iter().filter_map(|frame| frame.func_name()).take(MAX_FRAMES) {
        // Without the hash that tells two versions of a crate apart.
        let name = format!("{:#}", rustc_demangle::demangle(name));
        let separator = if named.is_empty() { "" } else { ", from " };
        let _ = write!(named, "{separator}{}", cut(&name, MAX_NAME_BYTES));
    }
    (!named.is_empty()).then_some(named)
}
