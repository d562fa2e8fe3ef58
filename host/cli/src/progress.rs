//! How long work says what it is doing: one line a step, with bytes where they are known and the duration at the end.
//!
//! Everything goes to stderr, so that stdout stays what a script asked for. The work itself only knows the two traits;
//! whether a person watches a terminal or a log collects lines is decided here.

use std::io::IsTerminal;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use indicatif::{HumanBytes, ProgressBar, ProgressStyle};

/// Where steps are announced.
pub trait Progress: Sync {
    /// Begins a step; `total_bytes` turns it into a bar.
    fn begin(&self, what: &str, total_bytes: Option<u64>) -> Box<dyn Step>;
}

/// A step under way. Dropping it without `finish` means that it failed.
pub trait Step: Send + Sync {
    /// Bytes done so far.
    fn advance_to(&self, bytes: u64);
    /// Replaces what the step says it is doing.
    fn note(&self, text: &str);
    /// Ends the step well; `result` is appended to its line.
    fn finish(self: Box<Self>, result: &str);
}

/// Says nothing: for tests and for `--json`.
pub struct Silent;

/// Spinners and bars on a terminal, plain lines anywhere else.
pub struct Terminal;

impl Progress for Silent {
    fn begin(&self, _what: &str, _total_bytes: Option<u64>) -> Box<dyn Step> {
        Box::new(Silent)
    }
}

impl Step for Silent {
    fn advance_to(&self, _bytes: u64) {}
    fn note(&self, _text: &str) {}
    fn finish(self: Box<Self>, _result: &str) {}
}

impl Progress for Terminal {
    fn begin(&self, what: &str, total_bytes: Option<u64>) -> Box<dyn Step> {
        if std::io::stderr().is_terminal() {
            Box::new(Bar::new(what, total_bytes))
        } else {
            Box::new(Lines::new(what, total_bytes))
        }
    }
}

/// A step on a terminal.
struct Bar {
    bar: ProgressBar,
    what: String,
    started: Instant,
}

impl Bar {
    fn new(what: &str, total_bytes: Option<u64>) -> Self {
        let bar = match total_bytes {
            Some(total) => ProgressBar::new(total).with_style(style(
                "  {spinner} {msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} eta {eta}",
            )),
            None => ProgressBar::new_spinner().with_style(style("  {spinner} {msg} {elapsed}")),
        };
        bar.set_message(what.to_owned());
        bar.enable_steady_tick(Duration::from_millis(120));
        Self { bar, what: what.to_owned(), started: Instant::now() }
    }
}

impl Step for Bar {
    fn advance_to(&self, bytes: u64) {
        self.bar.set_position(bytes);
    }

    fn note(&self, text: &str) {
        self.bar.set_message(format!("{}: {text}", self.what));
    }

    fn finish(self: Box<Self>, result: &str) {
        self.bar.finish_and_clear();
        eprintln!("  ✓ {}", finished_line(&self.what, result, self.started));
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        if !self.bar.is_finished() {
            self.bar.finish_and_clear();
            eprintln!("  ✗ {}", self.what);
        }
    }
}

/// A step in a log: a line when it begins, one for every tenth of its bytes, one when it ends.
struct Lines {
    what: String,
    total_bytes: Option<u64>,
    tenths_said: AtomicU64,
    started: Instant,
}

impl Lines {
    fn new(what: &str, total_bytes: Option<u64>) -> Self {
        eprintln!("  - {what} ...");
        Self { what: what.to_owned(), total_bytes, tenths_said: AtomicU64::new(0), started: Instant::now() }
    }
}

impl Step for Lines {
    fn advance_to(&self, bytes: u64) {
        let Some(total) = self.total_bytes.filter(|total| *total > 0) else { return };
        let tenths = bytes.saturating_mul(10) / total;
        if self.tenths_said.fetch_max(tenths, Ordering::Relaxed) < tenths {
            eprintln!("  - {}: {} of {}", self.what, HumanBytes(bytes), HumanBytes(total));
        }
    }

    fn note(&self, _text: &str) {}

    fn finish(self: Box<Self>, result: &str) {
        eprintln!("  - {}", finished_line(&self.what, result, self.started));
    }
}

fn finished_line(what: &str, result: &str, started: Instant) -> String {
    let seconds = started.elapsed().as_secs_f64();
    if result.is_empty() {
        format!("{what}: done in {seconds:.1} s")
    } else {
        format!("{what}: {result} in {seconds:.1} s")
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("the templates above are constant and valid")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finished_line_names_the_step_and_its_result() {
        let line = finished_line("building hello", "42 KiB", Instant::now());
        assert!(line.starts_with("building hello: 42 KiB in "), "{line}");
    }
}
