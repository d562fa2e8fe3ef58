//! Progress of long work: one line per step, with bytes if they are known, and the duration at the end.
//!
//! Everything goes to stderr, so that stdout has only what a script asked for. The work itself knows only the
//! two traits; whether a person watches a terminal or a log collects lines is decided here.

use std::io::IsTerminal;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use indicatif::{HumanBytes, ProgressBar, ProgressStyle};

/// Receives the steps of long work.
pub trait Progress: Sync {
    /// Starts a step; `total_bytes` turns it into a bar.
    fn begin(&self, what: &str, total_bytes: Option<u64>) -> Box<dyn Step>;
    /// Starts a step with `total` items.
    fn count(&self, what: &str, total: u64) -> Box<dyn Step>;
}

/// A running step. Dropping it without `finish` means that it failed.
pub trait Step: Send + Sync {
    /// Sets the number of bytes or items that are done.
    fn advance_to(&self, done: u64);
    /// Sets the number of bytes of the whole step, if it was not known at the beginning.
    fn expect_bytes(&self, total: u64);
    /// Replaces the text that says what the step is doing.
    fn note(&self, text: &str);
    /// Ends the step successfully; `result` is appended to its line.
    fn finish(self: Box<Self>, result: &str);
}

/// Prints nothing: for tests and for `--json`.
pub struct Silent;

/// Spinners and bars on a terminal, plain lines anywhere else.
pub struct Terminal;

impl Progress for Silent {
    fn begin(&self, _what: &str, _total_bytes: Option<u64>) -> Box<dyn Step> {
        Box::new(Silent)
    }

    fn count(&self, _what: &str, _total: u64) -> Box<dyn Step> {
        Box::new(Silent)
    }
}

impl Step for Silent {
    fn advance_to(&self, _done: u64) {}
    fn expect_bytes(&self, _total: u64) {}
    fn note(&self, _text: &str) {}
    fn finish(self: Box<Self>, _result: &str) {}
}

impl Progress for Terminal {
    fn begin(&self, what: &str, total_bytes: Option<u64>) -> Box<dyn Step> {
        on_terminal(what, total_bytes.map_or(Total::Unknown, Total::Bytes))
    }

    fn count(&self, what: &str, total: u64) -> Box<dyn Step> {
        on_terminal(what, Total::Things(total))
    }
}

fn on_terminal(what: &str, total: Total) -> Box<dyn Step> {
    if std::io::stderr().is_terminal() {
        Box::new(Bar::new(what, total))
    } else {
        Box::new(Lines::new(what, total))
    }
}

/// Amount of work in a step.
#[derive(Clone, Copy)]
enum Total {
    Unknown,
    Bytes(u64),
    Things(u64),
}

/// The line of a step whose number of bytes is known.
const BYTES: &str = "  {spinner} {msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} eta {eta}";

/// A step on a terminal.
struct Bar {
    bar: ProgressBar,
    what: String,
    started: Instant,
}

impl Bar {
    fn new(what: &str, total: Total) -> Self {
        let bar = match total {
            Total::Bytes(total) => ProgressBar::new(total).with_style(style(BYTES)),
            Total::Things(total) => ProgressBar::new(total)
                .with_style(style("  {spinner} {msg} [{bar:30}] {pos}/{len} eta {eta}")),
            Total::Unknown => ProgressBar::new_spinner().with_style(style("  {spinner} {msg} {elapsed}")),
        };
        bar.set_message(what.to_owned());
        bar.enable_steady_tick(Duration::from_millis(120));
        Self { bar, what: what.to_owned(), started: Instant::now() }
    }
}

impl Step for Bar {
    fn advance_to(&self, done: u64) {
        self.bar.set_position(done);
    }

    fn expect_bytes(&self, total: u64) {
        self.bar.set_style(style(BYTES));
        self.bar.set_length(total);
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

/// A step in a log: one line when it starts, one for every tenth of it, and one when it finishes.
struct Lines {
    what: String,
    total: Total,
    tenths_said: AtomicU64,
    started: Instant,
}

impl Lines {
    fn new(what: &str, total: Total) -> Self {
        eprintln!("  - {what} ...");
        Self { what: what.to_owned(), total, tenths_said: AtomicU64::new(0), started: Instant::now() }
    }
}

impl Step for Lines {
    fn advance_to(&self, done: u64) {
        let (Total::Bytes(total @ 1..) | Total::Things(total @ 1..)) = self.total else { return };
        let tenths = done.saturating_mul(10) / total;
        if self.tenths_said.fetch_max(tenths, Ordering::Relaxed) < tenths {
            match self.total {
                Total::Bytes(_) => {
                    eprintln!("  - {}: {} of {}", self.what, HumanBytes(done), HumanBytes(total))
                }
                _ => eprintln!("  - {}: {done} of {total}", self.what),
            }
        }
    }

    /// Writes nothing, because a log gets no further lines of a step that began without its size.
    fn expect_bytes(&self, _total: u64) {}

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
