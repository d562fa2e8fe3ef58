//! Reads the KV pages of a session's conversations from the disk before its next turn.
//!
//! No page is computed and no model is loaded: the turn computes whatever is not found. A conversation counts only for the
//! model and the tokens that it was stored with, so a turn that encodes it again finds nothing of it.

use crate::{
    RuntimeError,
    capability::{StoredConversation, is_quick_conversation},
    dispatch::session_not_found,
    name::tenant_of,
    session::TurnHost,
};
use skep_engine::{Affinity, Cancel, Engine, Warmed};

/// The tokens of a conversation, and where their keys and values were found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WarmedConversation {
    pub name: String,
    pub model: String,
    /// Tokens that the model saw and produced.
    pub tokens: u64,
    /// Tokens whose pages were in memory.
    pub in_memory_tokens: u64,
    /// Tokens after these whose pages were on disk.
    pub on_disk_tokens: u64,
    /// Tokens whose pages were read into memory.
    pub read_tokens: u64,
    /// Tokens that the next turn has to compute.
    pub missing_tokens: u64,
    /// The reason that no page was looked up.
    pub skipped: Option<&'static str>,
}

/// Reads what is on disk of all conversations of a session, one after the other, as far as running requests leave room.
pub(crate) async fn warm(
    host: &TurnHost,
    agent: &str,
    session: &str,
) -> Result<Vec<WarmedConversation>, RuntimeError> {
    let tenant = tenant_of(session);
    let affinity = Affinity {
        tenant: tenant.to_owned(),
        agent: Some(agent.to_owned()),
        session: Some(session.to_owned()),
        public: host.reach.models.public_part(agent),
        ..Affinity::default()
    };
    // Taken before the session is read, so that a deletion in between notices.
    let _reading = host.reach.disk.read_ahead(tenant).await;
    let names = host.store.conversation_names(agent, session).await?;
    let names = names.ok_or_else(|| session_not_found(agent, session))?;
    let mut conversations = Vec::with_capacity(names.len());
    for name in names {
        // The conversation may have been deleted meanwhile.
        let Some(row) = host.store.conversation(agent, session, &name).await? else { continue };
        let is_quick = is_quick_conversation(row.body.len());
        let read = move |_: &Cancel| StoredConversation::read(&row);
        let stored = host.reach.compute.run_unless(is_quick, tenant, read).await?;
        let tokens = stored.transcript.tokens();
        let (warmed, page_tokens, skipped) = match engine_of(host, &stored) {
            Ok(engine) => (engine.warm(&affinity, tokens.to_vec()).await, engine.page_tokens(), None),
            Err(why) => (Warmed::default(), 0, Some(why)),
        };
        let of_pages = |pages: usize| (pages * page_tokens) as u64;
        let known = of_pages(warmed.in_memory + warmed.read);
        conversations.push(WarmedConversation {
            tokens: tokens.len() as u64,
            in_memory_tokens: of_pages(warmed.in_memory),
            on_disk_tokens: of_pages(warmed.on_disk),
            read_tokens: of_pages(warmed.read),
            missing_tokens: (tokens.len() as u64).saturating_sub(known),
            skipped,
            model: stored.model,
            name,
        });
    }
    Ok(conversations)
}

/// Returns the engine that the tokens of a conversation belong to, or why there is none.
fn engine_of(host: &TurnHost, stored: &StoredConversation) -> Result<Engine, &'static str> {
    if stored.transcript.tokens().is_empty() {
        return Err("the model has not processed any of it yet");
    }
    let found = host.reach.models.set().find(Some(&stored.model)).map_err(|_| "its model is not served")?;
    let model = found.loaded().ok_or("its model is not loaded")?;
    let engine = model.engine().ok_or("its model is computed by another server")?;
    match &stored.digest {
        Some(digest) if *digest == engine.info().digest => Ok(engine.clone()),
        _ => Err("its model has changed"),
    }
}
