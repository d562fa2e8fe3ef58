//! Backtraces of traps: the functions in which a guest stopped, by the names that its component has kept.

use crate::text::cut;
use std::fmt::Write;
use wasmtime::WasmBacktrace;

/// Maximum number of functions in a backtrace, innermost first. Functions without a name are skipped.
const MAX_FRAMES: usize = 12;
const MAX_NAME_BYTES: usize = 120;

/// Formats a backtrace as `pick, from choose, from run`, innermost function first. Returns `None` if no function has a
/// name.
pub(super) fn named(error: &wasmtime::Error) -> Option<String> {
    let frames = error.downcast_ref::<WasmBacktrace>()?.frames();
    let mut named = String::new();
    for name in frames.iter().filter_map(|frame| frame.func_name()).take(MAX_FRAMES) {
        // The alternate form omits the hash that distinguishes two versions of a crate.
        let name = format!("{:#}", rustc_demangle::demangle(name));
        let separator = if named.is_empty() { "" } else { ", from " };
        let _ = write!(named, "{separator}{}", cut(&name, MAX_NAME_BYTES));
    }
    (!named.is_empty()).then_some(named)
}
