//! A server that runs as a child process: it inherits nothing of the host's environment, communicates over three
//! pipes, and is killed when it is no longer needed.

use std::{collections::HashMap, path::Path, process::Stdio};
use tokio::{
    io::AsyncReadExt,
    process::{Child, ChildStderr, ChildStdin, ChildStdout, Command},
};

/// Maximum number of bytes of one process's standard error that are logged.
const MAX_LOG_BYTES: usize = 1 << 20;
const CHUNK_BYTES: usize = 4 << 10;

/// A running server process. Dropping it kills the process.
pub(super) struct Process {
    _child: Child,
}

impl Process {
    pub(super) fn start(
        name: &str,
        program: &str,
        arguments: &[String],
        environment: &HashMap<String, String>,
        folder: Option<&Path>,
    ) -> Result<(Self, ChildStdout, ChildStdin), String> {
        let mut command = Command::new(program);
        command.args(arguments).env_clear().envs(environment).kill_on_drop(true);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        if let Some(folder) = folder {
            command.current_dir(folder);
        }
        let started = command.spawn();
        let mut child = started.map_err(|error| {
            format!("{program:?} cannot be started: {error}; check `command` under [mcp.{name}] in skep.toml")
        })?;
        let piped = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (Some(input), Some(output), Some(errors)) = piped else {
            return Err("the pipes of the process cannot be opened".to_owned());
        };
        tokio::spawn(log(name.to_owned(), errors));
        Ok((Process { _child: child }, output, input))
    }
}

/// Copies standard error to the log until the process terminates. Reading continues after the logging limit is
/// reached, so that the process does not block on a full pipe.
async fn log(server: String, mut errors: ChildStderr) {
    let (mut chunk, mut logged) = (vec![0; CHUNK_BYTES], 0);
    while let Ok(bytes @ 1..) = errors.read(&mut chunk).await {
        if logged >= MAX_LOG_BYTES {
            continue;
        }
        logged += bytes;
        for line in String::from_utf8_lossy(&chunk[..bytes]).lines().filter(|line| !line.is_empty()) {
            tracing::info!(server, "{line}");
        }
        if logged >= MAX_LOG_BYTES {
            tracing::warn!(
                server,
                "an MCP server wrote {MAX_LOG_BYTES} bytes to standard error; further output is not logged"
            );
        }
    }
}
