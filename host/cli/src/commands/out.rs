//! Prints results: JSON for scripts, columns for people. If the reader goes away, the error is [`OutputClosed`].

use std::io::{self, StdoutLock, Write as _};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, anyhow};
use serde::Serialize;

use crate::failure::OutputClosed;

/// Prints `value` as indented JSON.
pub fn json(value: &impl Serialize) -> Result<()> {
    line(&serde_json::to_string_pretty(value)?)
}

/// Prints `value` as one line of JSON.
pub fn json_line(value: &impl Serialize) -> Result<()> {
    line(&serde_json::to_string(value)?)
}

/// Prints a line.
pub fn line(text: &str) -> Result<()> {
    write(|stdout| writeln!(stdout, "{text}"))
}

/// Prints text at once, without waiting for the end of a line.
pub fn piece(text: &str) -> Result<()> {
    bytes(text.as_bytes())
}

/// Prints bytes at once.
pub fn bytes(bytes: &[u8]) -> Result<()> {
    write(|stdout| {
        stdout.write_all(bytes)?;
        stdout.flush()
    })
}

fn write(text: impl FnOnce(&mut StdoutLock<'_>) -> io::Result<()>) -> Result<()> {
    match text(&mut io::stdout().lock()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(anyhow!(OutputClosed)),
        written => written.context("cannot print the result"),
    }
}

/// Prints rows under a header, every column as wide as its widest cell.
pub fn table<const N: usize>(header: [&str; N], rows: &[[String; N]]) -> Result<()> {
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.chain([header[column].chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..N).map(width).collect();
    let row = |cells: [&str; N]| {
        let padded: Vec<String> =
            cells.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        padded.join("  ").trim_end().to_owned()
    };
    line(&crate::style::stdout().bold(&row(header)))?;
    for cells in rows {
        line(&row(std::array::from_fn(|column| cells[column].as_str())))?;
    }
    Ok(())
}

/// Returns a number with its noun, in the plural unless it is 1.
pub fn count(number: u64, noun: &str) -> String {
    let ending = match number {
        1 => "",
        _ if noun.ends_with("ch") => "es",
        _ => "s",
    };
    format!("{number} {noun}{ending}")
}

/// Describes a length of time in its largest whole unit.
pub fn duration(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7_200 => format!("{} min", seconds / 60),
        7_200..172_800 => format!("{} h", seconds / 3_600),
        _ => format!("{} days", seconds / 86_400),
    }
}

/// Describes how long ago a time was.
pub fn ago(at_ms: u64) -> String {
    let since =
        SystemTime::now().duration_since(UNIX_EPOCH + Duration::from_millis(at_ms)).unwrap_or_default();
    format!("{} ago", duration(since.as_secs()))
}
