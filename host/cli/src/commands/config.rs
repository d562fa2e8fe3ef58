//! `skep config`: checks a `skep.toml`, and shows and reloads the configuration of a running host.

use std::path::{Path, PathBuf};

use anyhow::Result;
use skep_api::{Config, ConfigReload, Setting, marker};

use super::{HostArgs, out};
use crate::settings;
use crate::style;

/// Check a skep.toml, and show or reload the configuration of a running host
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    Check(CheckArgs),
    Show(ShowArgs),
    Reload(ReloadArgs),
}

/// Check a skep.toml as the start of a host would, without starting one
///
/// An error names the line and what would be valid. Unknown names, such as a granted model that the host would not serve, are
/// warnings: they do not keep a host from starting. No model is loaded or downloaded, and nothing is connected.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep config check
  skep config check /etc/skep/skep.toml && systemctl reload skep")]
pub struct CheckArgs {
    /// Path of the file
    #[arg(value_name = "FILE", default_value = "skep.toml")]
    file: PathBuf,
}

/// Show the settings of a running host, or those of a file; secrets are not shown
///
/// Settings that are not listed have their default, see: skep up --help
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep config show
  skep config show --config skep.toml
  skep config show --json | jq -r '.settings[] | select(.flag) | .key'")]
pub struct ShowArgs {
    #[command(flatten)]
    host: HostArgs,
    /// Show this file instead of the settings of a host
    #[arg(long, value_name = "FILE", conflicts_with_all = ["url", "api_key"])]
    config: Option<PathBuf>,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// Read the configuration of a running host again, from the file that it was started with
///
/// The whole file is checked before anything changes: a file that is not valid changes nothing. Running requests and turns
/// end with the settings with which they began. The sections [[model]], [[upstream]], [[route]], [prices], [tenants],
/// [limits], [grants], [agents], [mcp], [[webhook]], [requests] and [ai] apply at once; other settings need a restart and are
/// listed. SIGHUP does the same and writes the result to the log.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep config reload
  kill -HUP $(pidof skep)
  skep config reload --json | jq -r '.needs_restart[].key'")]
pub struct ReloadArgs {
    #[command(flatten)]
    host: HostArgs,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// Checks a file, or shows or reloads the configuration of the host.
pub async fn run(command: Command) -> Result<()> {
    match command {
        Command::Check(args) => check(&args),
        Command::Show(args) => show(args).await,
        Command::Reload(args) => reload(args).await,
    }
}

fn check(args: &CheckArgs) -> Result<()> {
    let (_, warnings) = settings::check(&args.file)?;
    style::warn(&warnings);
    let about = match warnings.len() {
        0 => String::new(),
        count => format!(", with {}", out::count(count as u64, "warning")),
    };
    out::line(&format!("{} is valid{about}", args.file.display()))
}

async fn show(args: ShowArgs) -> Result<()> {
    let config = match &args.config {
        Some(file) => of_file(file)?,
        None => args.host.client()?.config().await?,
    };
    if args.json {
        return out::json(&config);
    }
    for line in lines(&config) {
        out::line(&line)?;
    }
    Ok(())
}

async fn reload(args: ReloadArgs) -> Result<()> {
    let reloaded = args.host.client()?.reload_config().await?;
    if args.json {
        return out::json(&reloaded);
    }
    let ConfigReload { file, changed, needs_restart, warnings, .. } = reloaded;
    match changed.len() {
        0 => out::line(&format!("{file}: no reloadable setting has changed"))?,
        count => out::line(&format!("{file}: {}", out::count(count as u64, "change")))?,
    }
    for change in changed {
        out::line(&format!("  {change}"))?;
    }
    if !needs_restart.is_empty() {
        out::line("needs a restart:")?;
    }
    for change in needs_restart {
        out::line(&format!("  {change}"))?;
    }
    style::warn(&warnings);
    Ok(())
}

fn of_file(file: &Path) -> Result<Config> {
    let (options, warnings) = settings::check(file)?;
    style::warn(&warnings);
    Ok(Config {
        object: marker::Config,
        file: Some(file.display().to_string()),
        settings: options.source.written.settings(),
        needs_restart: Vec::new(),
    })
}

/// Returns the settings as lines in the format of the file, each section once.
fn lines(config: &Config) -> Vec<String> {
    let mut lines = Vec::new();
    match &config.file {
        Some(file) => lines.push(format!("# {file}")),
        None => lines.push("# no file: everything that is not listed has its default".to_owned()),
    }
    let mut current = "";
    for Setting { section, key, value, flag } in &config.settings {
        if section != current {
            lines.extend([String::new(), section.clone()]);
            current = section;
        }
        let flag = flag.as_ref().map(|flag| format!("  # {flag}")).unwrap_or_default();
        lines.push(format!("{key} = {value}{flag}"));
    }
    if !config.needs_restart.is_empty() {
        lines.extend([String::new(), "# changed in the file; applied by a restart:".to_owned()]);
        lines.extend(config.needs_restart.iter().map(|change| format!("#   {change}")));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use skep_api::SettingChange;

    #[test]
    fn settings_are_printed_by_section_with_their_flags() {
        let setting = |section: &str, key: &str, value: &str, flag: Option<&str>| Setting {
            section: section.to_owned(),
            key: key.to_owned(),
            value: value.to_owned(),
            flag: flag.map(str::to_owned),
        };
        let change = SettingChange {
            section: "[http]".to_owned(),
            key: "drain_s".to_owned(),
            from: None,
            to: Some("5".to_owned()),
        };
        let config = Config {
            object: marker::Config,
            file: Some("skep.toml".to_owned()),
            settings: vec![
                setting("", "listen", "\"[::1]:80\"", Some("--listen")),
                setting("[limits]", "cpu_ms", "5", None),
                setting("[limits]", "turn_ms", "6", None),
            ],
            needs_restart: vec![change],
        };
        assert_eq!(
            lines(&config).join("\n"),
            "# skep.toml\nlisten = \"[::1]:80\"  # --listen\n\n[limits]\ncpu_ms = 5\nturn_ms = 6\n\n\
             # changed in the file; applied by a restart:\n#   [http] drain_s: not set → 5"
        );
    }
}
