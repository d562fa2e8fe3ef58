//! The server that a benchmark drives over HTTP: a host that it starts in this process, or any server by its
//! address.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use skep_engine::EngineStats;

use crate::catalog;
use crate::client::ChatClient;
use crate::device_flag::DeviceFlag;
use crate::progress::Terminal;
use crate::{
    server::{self, RunningServer},
    server_options::ServerOptions,
};

/// Maximum wait for cancelled requests, which end at the engine's next step.
const DRAIN: Duration = Duration::from_secs(30);

/// Flags that select a server.
#[derive(Debug, clap::Args)]
pub struct TargetArgs {
    /// Drive this server, which must have OpenAI's routes, such as http://127.0.0.1:8080/v1 [default: a host
    /// in this process]
    #[arg(long, value_name = "URL", conflicts_with_all = ["threads", "device", "deterministic"])]
    pub url: Option<String>,
    /// Model: a name, hf:OWNER/REPO[:FILE], or a path; with --url, the name that requests use [default:
    /// smollm2-135m; with --url "default"]
    #[arg(long, value_name = "NAME|PATH")]
    pub model: Option<String>,
    /// Threads for the model's computation [default: physical cores]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    #[command(flatten)]
    pub device: DeviceFlag,
}

/// A server to drive.
pub struct Target {
    pub client: ChatClient,
    /// Name that requests use for the model.
    pub model: String,
    /// Destination of requests, as text for people.
    pub label: String,
    here: Option<RunningServer>,
}

impl Target {
    /// Starts a host with `options`, unless `args` name another server. The host's model, threads and device
    /// come from `args`.
    pub async fn start(args: &TargetArgs, options: ServerOptions) -> Result<Self> {
        if let Some(url) = &args.url {
            let model = args.model.clone().unwrap_or_else(|| "default".to_owned());
            return Ok(Self { client: ChatClient::new(url)?, model, label: url.clone(), here: None });
        }
        let mut options = ServerOptions {
            listen: ([127, 0, 0, 1], 0).into(),
            model: args.model.clone().unwrap_or_else(|| catalog::DEFAULT_MODEL.to_owned()),
            threads: args.threads,
            ..options
        };
        args.device.apply(&mut options.executor);
        let server = server::start_with(options, Vec::new(), Arc::new(Terminal)).await?;
        let client = ChatClient::new(&format!("{}/v1", server.url()))?;
        let model = server.host.models().default_name();
        Ok(Self { client, label: format!("{model} in this process"), model, here: Some(server) })
    }

    /// Returns the current statistics of the engine of a host in this process.
    pub fn stats(&self) -> Option<EngineStats> {
        self.here.as_ref()?.host.models().engines().next().map(|engine| engine.stats())
    }

    /// Stops a host in this process when all its work has finished, and returns the last statistics of its
    /// engine.
    pub async fn stop(self) -> Option<EngineStats> {
        let server = self.here?;
        let engine = server.host.models().engines().next();
        server.shutdown().await;
        let engine = engine?;
        engine.drain(DRAIN).await;
        Some(engine.stats())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;

    #[derive(Debug, clap::Parser)]
    struct Wrapper {
        #[command(flatten)]
        target: TargetArgs,
    }

    #[test]
    fn compute_flags_are_refused_for_another_server() {
        for flag in [["--threads", "2"].as_slice(), &["--device", "cpu"], &["--deterministic"]] {
            let words = ["load"].into_iter().chain(flag.iter().copied());
            Wrapper::try_parse_from(words.clone()).expect("a host in this process accepts it");
            let words = words.chain(["--url", "http://127.0.0.1:1/v1"]);
            let error = Wrapper::try_parse_from(words).expect_err("another server refuses it").to_string();
            assert!(error.contains("--url") && error.contains(flag[0]), "{error}");
        }
    }
}
