//! The structured log, on stderr: what the host's parts report through `tracing`.

use clap::ValueEnum;
use tracing_subscriber::EnvFilter;

/// How a line of the log looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// Starts the log. `level` is a level (`info`) or a filter such as `warn,skep_runtime=debug`.
pub fn start(level: &str, format: LogFormat) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(level).map_err(|error| {
        let message =
            format!("--log-level {level:?}: {error}\n  hint: use error, warn, info, debug, trace or off");
        crate::failure::Usage(message)
    })?;
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let started = match format {
        LogFormat::Text => {
            use std::io::IsTerminal as _;
            let coloured = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
            log.with_ansi(coloured).with_target(false).try_init()
        }
        LogFormat::Json => log.json().flatten_event(true).try_init(),
    };
    // A log that is already there was set up by an embedding program.
    started.or(Ok(()))
}
