//! `skep session`: lists, searches, shows, exports, imports, forks and deletes sessions, and manages their KV pages on
//! disk.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;
use skep_api::{Conversation, NumberedMessage, RecentSession, Session, SessionDetail};
use skep_runtime::for_terminal;

use super::{HostArgs, confirmation::confirmed, out, session_pages};
use crate::client::{ImportOptions, SaidQuery};
use crate::style;

/// Maximum size of a document that can be imported.
const MAX_DOCUMENT_BYTES: u64 = 64 << 20;

/// List, search, show, copy, move and delete the sessions of an agent, and read ahead or pin their KV pages
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    List(ListArgs),
    Search(SearchArgs),
    Show(ShowArgs),
    Export(ExportArgs),
    Import(ImportArgs),
    Fork(ForkArgs),
    Warm(session_pages::WarmArgs),
    Pin(session_pages::PinArgs),
    Unpin(session_pages::UnpinArgs),
    Delete(DeleteArgs),
}

/// List the sessions of an agent
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep session list concierge
  skep session list concierge --limit 1000 --after room-7
  skep session list concierge --json | jq -r '.[].id'
  skep session list concierge --tenant acme                 as an admin; other commands take acme/ID")]
pub struct ListArgs {
    /// Name of the agent
    agent: String,
    /// List the sessions of this tenant, as an admin [default: the key's own tenant]
    #[arg(long)]
    tenant: Option<String>,
    /// Only sessions whose id comes after this one
    #[arg(long, value_name = "SESSION")]
    after: Option<String>,
    /// Maximum number of sessions
    #[arg(long, short = 'n', default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1000))]
    limit: u32,
    /// Print as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    host: HostArgs,
}

/// Find the sessions in which words were said, those with the newest turn first
///
/// One message of a session has to have all words, in upper or lower case and in any order. Messages of people, models and tools
/// are searched, with the calls that models make; system messages and reasoning are not.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep session search broken suitcase
  skep session search refund --agent concierge -n 5
  skep session search refund --json | jq -r '.[] | .agent + \" \" + .id'
  skep session search refund --tenant acme        as an admin; without it, in all tenants")]
pub struct SearchArgs {
    /// The words
    #[arg(required = true, value_name = "WORD")]
    words: Vec<String>,
    /// Only sessions of this agent
    #[arg(long)]
    agent: Option<String>,
    /// Only sessions of this tenant
    #[arg(long)]
    tenant: Option<String>,
    /// Maximum number of sessions
    #[arg(long, short = 'n', default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1000))]
    limit: u32,
    /// Print as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    host: HostArgs,
}

/// Show the contents of a session, and the messages of one of its conversations
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep session show concierge room-7
  skep session show concierge room-7 --after 20 -n 20       the next page of messages
  skep session show concierge room-7 --json | jq -r '.messages[].content'")]
pub struct ShowArgs {
    /// Name of the agent
    agent: String,
    /// Id of the session
    session: String,
    /// Conversation whose messages are shown
    #[arg(long, default_value = "main", value_name = "NAME")]
    conversation: String,
    /// Only messages whose number is above this one
    #[arg(long, default_value_t = 0, value_name = "NUMBER")]
    after: u64,
    /// Maximum number of messages
    #[arg(long, short = 'n', default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=1000))]
    limit: u32,
    /// Print as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    host: HostArgs,
}

/// Export a whole session to a file: its state, its messages and their tokens
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep session export concierge room-7 -o room-7.json
  skep session export concierge room-7 | gzip > room-7.json.gz
  skep session export concierge room-7 | skep session import concierge - --url http://other:8080")]
pub struct ExportArgs {
    /// Name of the agent
    agent: String,
    /// Id of the session
    session: String,
    /// File to write; - is standard output
    #[arg(long, short, default_value = "-", value_name = "FILE")]
    output: PathBuf,
    #[command(flatten)]
    host: HostArgs,
}

/// Create a session from an export; it continues with the same tokens
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep session import concierge room-7.json
  skep session import concierge room-7.json --session room-8
  skep session import concierge room-7.json --replace       replaces an existing session
  skep session import concierge-2 room-7.json --from-other-agent
  gunzip -c room-7.json.gz | skep session import concierge -")]
pub struct ImportArgs {
    /// Name of the agent
    agent: String,
    /// File that `skep session export` wrote; - is standard input
    file: PathBuf,
    /// Id of the session [default: the id that it had]
    #[arg(long, short, value_name = "SESSION")]
    session: Option<String>,
    /// Replace an existing session, with everything that belongs to it
    #[arg(long)]
    replace: bool,
    /// Accept the export of an agent with another name: this agent continues with its state and conversations
    #[arg(long)]
    from_other_agent: bool,
    /// Print the session as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    host: HostArgs,
}

/// Create a session as a copy of another one
///
/// The copy has the state and the conversations that were last committed. Both sessions share what the model
/// has computed so far, and are independent from then on.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep session fork concierge room-7 room-7-what-if
  skep invoke concierge 'And without breakfast?' -s room-7-what-if")]
pub struct ForkArgs {
    /// Name of the agent
    agent: String,
    /// Session to copy
    session: String,
    /// Id of the copy
    to: String,
    /// Print the copy as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    host: HostArgs,
}

/// Delete a session with its state, conversations, turns and log lines
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep session delete concierge room-7
  skep session delete concierge room-7 --yes                without asking, for scripts")]
pub struct DeleteArgs {
    /// Name of the agent
    agent: String,
    /// Id of the session
    session: String,
    /// Do not ask for confirmation
    #[arg(long, short)]
    yes: bool,
    #[command(flatten)]
    host: HostArgs,
}

/// Lists, shows, exports, imports, forks or deletes sessions.
pub async fn run(command: Command) -> Result<()> {
    match command {
        Command::List(args) => list(args).await,
        Command::Search(args) => search(args).await,
        Command::Show(args) => show(args).await,
        Command::Export(args) => export(args).await,
        Command::Import(args) => import(args).await,
        Command::Fork(args) => fork(args).await,
        Command::Warm(args) => session_pages::warm(args).await,
        Command::Pin(args) => session_pages::pin(args).await,
        Command::Unpin(args) => session_pages::unpin(args).await,
        Command::Delete(args) => delete(args).await,
    }
}

async fn list(args: ListArgs) -> Result<()> {
    let client = args.host.client()?;
    let ListArgs { agent, tenant, after, limit, .. } = &args;
    let (sessions, has_more) = client.sessions(agent, tenant.as_deref(), after.as_deref(), *limit).await?;
    if args.json {
        return out::json(&sessions);
    }
    let Some(last) = sessions.last().map(|session| session.id.clone()) else {
        return out::line(&match (&after, &tenant) {
            (Some(after), _) => format!("no sessions of agent {agent:?} after {after:?}"),
            (None, Some(tenant)) => format!("no sessions of agent {agent:?} for tenant {tenant:?}"),
            (None, None) => {
                format!(
                    "no sessions of agent {agent:?}; the first message creates one: skep invoke {agent} TEXT"
                )
            }
        });
    };
    let rows: Vec<_> = sessions
        .into_iter()
        .map(|Session { id, turns, created_at_ms, updated_at_ms, .. }| {
            [id, turns.to_string(), out::ago(created_at_ms), out::ago(updated_at_ms)]
        })
        .collect();
    out::table(["SESSION", "TURNS", "CREATED", "LAST TURN"], &rows)?;
    if has_more {
        let tenant = args.tenant.map(|tenant| format!(" --tenant {tenant}")).unwrap_or_default();
        let more = format!("there are more: skep session list {}{tenant} --after {last}", args.agent);
        eprintln!("{}", style::stderr().dim(&more));
    }
    Ok(())
}

async fn search(args: SearchArgs) -> Result<()> {
    let client = args.host.client()?;
    let query = SaidQuery { text: args.words.join(" "), agent: args.agent, tenant: args.tenant };
    let (mut sessions, mut before) = (Vec::new(), None::<String>);
    // The host searches a part of the sessions with each request.
    loop {
        let left = args.limit - sessions.len() as u32;
        let page = client.search_sessions(&query, left, before.as_deref()).await?;
        sessions.extend(page.data);
        before = page.searched_to;
        if before.is_none() || sessions.len() >= args.limit as usize {
            break;
        }
    }
    if args.json {
        return out::json(&sessions);
    }
    if sessions.is_empty() {
        return out::line("no session has a message with all of these words");
    }
    let rows: Vec<_> = sessions.into_iter().map(found).collect();
    out::table(["AGENT", "SESSION", "LAST TURN", "SAID"], &rows)?;
    if before.is_some() {
        let more = format!("older sessions were not searched: raise --limit, which is {}", args.limit);
        eprintln!("{}", style::stderr().dim(&more));
    }
    Ok(())
}

fn found(session: RecentSession) -> [String; 4] {
    let RecentSession { agent, id, updated_at_ms, said, .. } = session;
    let said = said.map(|said| format!("{}: {}", said.role, for_terminal(&said.excerpt)));
    [agent, id, out::ago(updated_at_ms), said.unwrap_or_default()]
}

async fn show(args: ShowArgs) -> Result<()> {
    let ShowArgs { agent, session, conversation, after, limit, .. } = &args;
    let client = args.host.client()?;
    let detail = client.session(agent, session).await?;
    let page = match client.messages(agent, session, conversation, *after, *limit).await {
        Ok(page) => Some(page),
        // An agent may have no conversation.
        Err(error) if *conversation == "main" && is_missing(&error) => None,
        Err(error) => return Err(error),
    };
    let (messages, total, has_more) =
        page.map_or_else(Default::default, |page| (page.data, page.total, page.has_more));
    if args.json {
        let mut value = serde_json::to_value(&detail)?;
        value["messages"] = serde_json::to_value(&messages)?;
        value["total_messages"] = total.into();
        value["has_more_messages"] = has_more.into();
        return out::json(&value);
    }
    summary(&detail)?;
    for message in &messages {
        out::line(&for_people(message))?;
    }
    if messages.is_empty() {
        out::line(&match after {
            0 => format!("no messages in conversation {conversation:?}"),
            after => format!("no messages in conversation {conversation:?} after number {after}"),
        })?;
    }
    if let Some(last) = messages.last().filter(|_| has_more) {
        let more = format!("message {} of {total}; the next page: --after {}", last.number, last.number);
        eprintln!("{}", style::stderr().dim(&more));
    }
    Ok(())
}

fn is_missing(error: &anyhow::Error) -> bool {
    let refused = error.downcast_ref::<crate::failure::Refused>();
    refused.is_some_and(|refused| refused.code == "conversation_not_found")
}

fn summary(detail: &SessionDetail) -> Result<()> {
    let SessionDetail { session, conversations, usage, state_keys, state_bytes, .. } = detail;
    let paint = style::stdout();
    let keys = match state_keys.len() {
        0 => "no state".to_owned(),
        _ => format!("{state_bytes} bytes of state under {}", state_keys.join(", ")),
    };
    out::line(&paint.bold(&session.id))?;
    out::line(&format!(
        "  {}, the first {}, the last {}",
        out::count(session.turns, "turn"),
        out::ago(session.created_at_ms),
        out::ago(session.updated_at_ms)
    ))?;
    out::line(&format!(
        "  {} prompt tokens ({} cached), {} generated; {keys}",
        usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens, usage.completion_tokens
    ))?;
    for Conversation { name, model, messages, bytes } in conversations {
        out::line(&format!("  conversation {name}: {messages} messages with {model}, {bytes} bytes"))?;
    }
    Ok(())
}

fn for_people(NumberedMessage { message, number, .. }: &NumberedMessage) -> String {
    let calls = message.tool_calls.iter().map(|call| {
        let function = &call.function;
        format!("\n     calls {} {}", function.name, function.arguments)
    });
    let paint = style::stdout();
    let reasoning = message.reasoning.as_deref().map(|text| {
        let reasoning = format!("reasoning: {}", text.trim());
        format!("{}\n     ", paint.dim(&reasoning))
    });
    format!(
        "{number:>4} {}: {}{}{}",
        paint.bold(&message.role),
        reasoning.unwrap_or_default(),
        message.content.trim_end(),
        calls.collect::<String>()
    )
}

async fn export(args: ExportArgs) -> Result<()> {
    let document = args.host.client()?.export_session(&args.agent, &args.session).await?;
    if is_dash(&args.output) {
        out::bytes(&document)?;
        return out::line("");
    }
    std::fs::write(&args.output, &document)
        .with_context(|| format!("cannot write {}", args.output.display()))?;
    eprintln!("wrote {} bytes to {}", document.len(), args.output.display());
    Ok(())
}

async fn import(args: ImportArgs) -> Result<()> {
    #[derive(Deserialize)]
    struct Named {
        session: String,
    }
    let document = read(&args.file)?;
    let session = match args.session {
        Some(session) => session,
        None => {
            let named: Named = serde_json::from_slice(&document).with_context(|| {
                format!("{} was not written by `skep session export`", args.file.display())
            })?;
            named.session
        }
    };
    let client = args.host.client()?;
    let options = ImportOptions { replace: args.replace, from_other_agent: args.from_other_agent };
    let imported = client.import_session(&args.agent, &session, document, options).await?;
    if args.json {
        return out::json(&imported);
    }
    out::line(&format!("imported {} with {}", imported.id, out::count(imported.turns, "turn")))
}

async fn fork(args: ForkArgs) -> Result<()> {
    let fork = args.host.client()?.fork_session(&args.agent, &args.session, &args.to).await?;
    if args.json {
        return out::json(&fork);
    }
    out::line(&format!("{} is a copy of {} after {}", fork.id, args.session, out::count(fork.turns, "turn")))
}

async fn delete(args: DeleteArgs) -> Result<()> {
    let DeleteArgs { agent, session, .. } = &args;
    let client = args.host.client()?;
    if !args.yes && !confirmed(&format!("permanently delete session {session} of {agent}?"))? {
        return out::line("nothing was deleted");
    }
    client.delete_session(agent, session).await?;
    out::line(&format!("deleted {session}"))
}

fn read(file: &Path) -> Result<Vec<u8>> {
    let cannot = || format!("cannot read {}", file.display());
    let mut document = Vec::new();
    if is_dash(file) {
        std::io::stdin().lock().take(MAX_DOCUMENT_BYTES + 1).read_to_end(&mut document)?;
    } else {
        let opened = std::fs::File::open(file).with_context(cannot)?;
        opened.take(MAX_DOCUMENT_BYTES + 1).read_to_end(&mut document).with_context(cannot)?;
    }
    if document.len() as u64 > MAX_DOCUMENT_BYTES {
        bail!(
            "{} has more than {MAX_DOCUMENT_BYTES} bytes, which is the maximum that a host imports",
            file.display()
        );
    }
    Ok(document)
}

fn is_dash(path: &Path) -> bool {
    path == Path::new("-")
}
