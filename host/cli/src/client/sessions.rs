//! Sessions of agents on a running host.

use anyhow::Result;
use reqwest::{Method, header};
use skep_api::{
    ForkSession, MessagePage, RecentSessionPage, Session, SessionDetail, SessionPage, SessionPin,
    WarmedSession,
};

use super::Client;

/// Permissions of an import, all of them off by default.
#[derive(Debug, Clone, Copy, Default)]
pub struct ImportOptions {
    /// Replace a session that exists.
    pub replace: bool,
    /// Accept a session of an agent with another name.
    pub from_other_agent: bool,
}

/// Selects sessions by what was said in them.
#[derive(Debug, Clone, Default)]
pub struct SaidQuery {
    /// The words, all of which one message has.
    pub text: String,
    pub agent: Option<String>,
    pub tenant: Option<String>,
}

impl Client {
    /// Returns a page of the sessions in which words were said, the newest first. `before` is the `searched_to` of the page
    /// before.
    pub async fn search_sessions(
        &self,
        query: &SaidQuery,
        limit: u32,
        before: Option<&str>,
    ) -> Result<RecentSessionPage> {
        let SaidQuery { text, agent, tenant } = query;
        let mut url = self.url(&["v1", "sessions"])?;
        url.query_pairs_mut().append_pair("text", text).append_pair("limit", &limit.to_string());
        let (agent, tenant) = (agent.as_deref(), tenant.as_deref());
        for (name, value) in [("agent", agent), ("tenant", tenant), ("before", before)] {
            if let Some(value) = value {
                url.query_pairs_mut().append_pair(name, value);
            }
        }
        self.json(self.http.get(url)).await
    }

    /// Returns sessions of an agent in the order of their ids, and whether there are more. An admin may name
    /// another tenant.
    pub async fn sessions(
        &self,
        agent: &str,
        tenant: Option<&str>,
        after: Option<&str>,
        limit: u32,
    ) -> Result<(Vec<Session>, bool)> {
        let mut url = self.url(&["v1", "agents", agent, "sessions"])?;
        url.query_pairs_mut().append_pair("limit", &limit.to_string());
        for (name, value) in [("after", after), ("tenant", tenant)] {
            if let Some(value) = value {
                url.query_pairs_mut().append_pair(name, value);
            }
        }
        let page: SessionPage = self.json(self.http.get(url)).await?;
        Ok((page.data, page.has_more))
    }

    /// Returns the details of one session.
    pub async fn session(&self, agent: &str, session: &str) -> Result<SessionDetail> {
        self.json(self.request(Method::GET, &session_path(agent, session))?).await
    }

    /// Returns the messages of a conversation whose numbers are greater than `after`.
    pub async fn messages(
        &self,
        agent: &str,
        session: &str,
        conversation: &str,
        after: u64,
        limit: u32,
    ) -> Result<MessagePage> {
        let mut url = self.url(&["v1", "agents", agent, "sessions", session, "messages"])?;
        url.query_pairs_mut()
            .append_pair("conversation", conversation)
            .append_pair("after", &after.to_string())
            .append_pair("limit", &limit.to_string());
        self.json(self.http.get(url)).await
    }

    /// Creates the session `to` as a copy.
    pub async fn fork_session(&self, agent: &str, session: &str, to: &str) -> Result<Session> {
        let request = self.request(Method::POST, &["v1", "agents", agent, "sessions", session, "fork"])?;
        self.json(request.json(&ForkSession { session: to.to_owned() })).await
    }

    /// Reads the KV pages of a session from the disk into memory.
    pub async fn warm_session(&self, agent: &str, session: &str) -> Result<WarmedSession> {
        let path = ["v1", "agents", agent, "sessions", session, "warm"];
        self.json(self.request(Method::POST, &path)?).await
    }

    /// Makes the KV pages of a session the last to be evicted from the disk, or undoes that.
    pub async fn pin_session(&self, agent: &str, session: &str, is_pinned: bool) -> Result<SessionPin> {
        let method = if is_pinned { Method::POST } else { Method::DELETE };
        self.json(self.request(method, &["v1", "agents", agent, "sessions", session, "pin"])?).await
    }

    /// Returns the exported document of a session, byte for byte as the host wrote it.
    pub async fn export_session(&self, agent: &str, session: &str) -> Result<Vec<u8>> {
        let request = self.request(Method::GET, &["v1", "agents", agent, "sessions", session, "export"])?;
        Ok(self.answer(request).await?.bytes().await?.into())
    }

    /// Creates a session from an exported document.
    pub async fn import_session(
        &self,
        agent: &str,
        session: &str,
        document: Vec<u8>,
        options: ImportOptions,
    ) -> Result<Session> {
        let mut url = self.url(&session_path(agent, session))?;
        url.query_pairs_mut()
            .append_pair("replace", &options.replace.to_string())
            .append_pair("from_other_agent", &options.from_other_agent.to_string());
        let request = self.http.put(url).header(header::CONTENT_TYPE, "application/json");
        self.json(request.body(document)).await
    }

    /// Deletes a session.
    pub async fn delete_session(&self, agent: &str, session: &str) -> Result<()> {
        self.answer(self.request(Method::DELETE, &session_path(agent, session))?).await.map(drop)
    }
}

fn session_path<'a>(agent: &'a str, session: &'a str) -> [&'a str; 5] {
    ["v1", "agents", agent, "sessions", session]
}
