//! Output of the host's `tracing` events: the log on stderr, and the spans that are exported as traces.

mod line;

use anyhow::Result;
use clap::ValueEnum;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer, Registry};

use crate::traces::{TraceOptions, Traces};

/// Format of the log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum LogFormat {
    /// Text for people to read
    #[default]
    Text,
    /// One JSON object per line
    Json,
}

/// Starts the log, and the export of traces if `traces` is given. `level` is a level (`info`) or a filter
/// such as `warn,skep_runtime=debug`; it does not apply to traces.
pub fn start(level: &str, format: LogFormat, traces: Option<&TraceOptions>) -> Result<Option<Traces>> {
    let filter = EnvFilter::try_new(level).map_err(|error| {
        let message =
            format!("--log-level {level:?}: {error}\n  hint: use error, warn, info, debug, trace or off");
        crate::failure::Usage(message)
    })?;
    let traces = traces.map(Traces::start).transpose()?;
    let lines: Box<dyn Layer<Registry> + Send + Sync> = match format {
        LogFormat::Text => {
            use std::io::IsTerminal as _;
            let colored = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
            let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(colored);
            lines.fmt_fields(line::TurnFields).event_format(line::HumanFormat).boxed()
        }
        LogFormat::Json => json_lines(std::io::stderr),
    };
    let layers = tracing_subscriber::registry()
        .with(lines.with_filter(filter))
        .with(traces.as_ref().map(Traces::layer));
    // A log that already exists was set up by an embedding program.
    layers.try_init().or(Ok::<_, anyhow::Error>(()))?;
    Ok(traces)
}

/// Returns the layer that writes JSON. The list of all spans has the fields of the current one, so it is not written again.
fn json_lines<W>(writer: W) -> Box<dyn Layer<Registry> + Send + Sync>
where
    W: for<'writer> MakeWriter<'writer> + Send + Sync + 'static,
{
    let lines = tracing_subscriber::fmt::layer().with_writer(writer);
    lines.json().flatten_event(true).with_current_span(false).boxed()
}
