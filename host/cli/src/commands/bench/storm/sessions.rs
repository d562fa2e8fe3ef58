//! Expected contents of a session, and how clients leave it: checked, sometimes copied, and mostly deleted.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use rand::RngExt as _;
use rand::rngs::StdRng;
use serde_json::{Value, json};

use super::books::Reported;
use super::{AGENT, CALLEE, Response, Storm};

/// Time after which an alarm or an event counts as lost.
const LATEST: Duration = Duration::from_secs(120);

/// The orders of a session, as its client knows them.
pub struct Ledger {
    pub session: String,
    /// Ids in the order in which they were sent, each with whether its outcome is unknown.
    orders: Vec<(String, bool)>,
    /// Alarms and events in flight. Deleting the session deletes them too.
    awaited: Vec<(&'static str, String)>,
}

impl Ledger {
    /// Creates the ledger of a session that has no orders yet.
    pub fn new(session: String) -> Self {
        Self { session, orders: Vec::new(), awaited: Vec::new() }
    }

    /// Returns the path of the session in the HTTP API.
    pub fn path(&self) -> String {
        path(&self.session)
    }

    /// Returns the path to which messages for the session are posted.
    pub fn messages(&self) -> String {
        format!("{}/messages", self.path())
    }

    /// Records an order, unless it failed.
    pub fn enter(&mut self, id: &str, reported: &Reported) {
        match reported {
            // A failed turn changes nothing, unless the answer that reported the failure was not its own.
            Reported::Failed(_) => {}
            Reported::Unsure => self.orders.push((id.to_owned(), true)),
            // The agent learned of the interruption, and has recorded the order anyway.
            Reported::Done | Reported::Interrupted => self.orders.push((id.to_owned(), false)),
        }
    }

    /// Records an effect that happens by itself, after its order was accepted.
    pub fn awaits(&mut self, kind: &'static str, id: &str, reported: &Reported) {
        if *reported == Reported::Done {
            self.awaited.push((kind, id.to_owned()));
        }
    }

    /// Returns how often each order with a certain outcome is among the entries, by its id, and the entries
    /// that nobody ordered.
    fn compare(&self, entries: &[String]) -> (Vec<(String, usize)>, Vec<String>) {
        let times = |id: &String| entries.iter().filter(|entry| *entry == id).count();
        let certain = self.orders.iter().filter(|(id, is_open)| !is_open || times(id) > 1);
        let found = certain.map(|(id, _)| (id.clone(), times(id))).collect();
        let strange = entries.iter().filter(|entry| !self.orders.iter().any(|(id, _)| id == *entry));
        (found, strange.cloned().collect())
    }

    /// Returns whether the orders among the entries are in the order in which they were sent.
    fn is_in_order(&self, entries: &[String]) -> bool {
        let positions: Vec<_> =
            self.orders.iter().filter_map(|(id, _)| entries.iter().position(|entry| entry == id)).collect();
        positions.is_sorted()
    }
}

fn path(session: &str) -> String {
    format!("/v1/agents/{AGENT}/sessions/{session}")
}

impl Storm {
    /// Compares a session with what its client knows, copies it now and then, and deletes most of what there
    /// is.
    pub async fn leave(&self, ledger: Ledger, draws: &mut StdRng) {
        let Some(entries) = self.entries(&ledger.session).await else { return };
        let (found, strange) = ledger.compare(&entries);
        for (id, times) in found {
            self.books.found("turn", &id, Reported::Done, times);
        }
        if !strange.is_empty() {
            self.trouble(format!(
                "session {} has {strange:?}, which failed or was not ordered",
                ledger.session
            ));
        }
        if !ledger.is_in_order(&entries) {
            self.trouble(format!("session {} has its entries in another order: {entries:?}", ledger.session));
        }
        let mut sessions = vec![ledger.session.clone(), format!("e-{}", ledger.session)];
        if draws.random_ratio(1, 4) {
            let copy = format!("f-{}", ledger.session);
            let answer = self
                .ask(|http, url| {
                    http.post(format!("{url}{}/fork", ledger.path())).json(&json!({ "session": copy }))
                })
                .await;
            sessions.extend(self.copied("fork", copy, answer, &entries).await);
        }
        if draws.random_ratio(1, 4) {
            let copy = format!("i-{}", ledger.session);
            let export = self.ask(|http, url| http.get(format!("{url}{}/export", ledger.path()))).await;
            let answer = self
                .ask(|http, url| http.put(format!("{url}{}?replace=true", path(&copy))).json(&export.body))
                .await;
            sessions.extend(self.copied("import", copy, answer, &entries).await);
        }
        let until = Instant::now() + LATEST;
        let comes = |(kind, id): &(&str, String)| self.outside.effects(kind, id) == 0;
        while ledger.awaited.iter().any(comes) && Instant::now() < until {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        for session in sessions {
            if self.plan.deletes_all || draws.random_ratio(3, 4) {
                self.delete(&session).await;
            }
        }
    }

    /// Checks that a copy is complete.
    async fn copied(
        &self,
        kind: &'static str,
        copy: String,
        answer: Response,
        entries: &[String],
    ) -> Option<String> {
        // A copy whose answer was lost may have been made.
        if answer.status != 201 && !(answer.status == 409 && answer.is_repeated) {
            self.trouble(format!("{kind} {copy}: {} {}", answer.status, answer.body));
            self.books.found(kind, &copy, Reported::Failed(answer.code()), 0);
            return None;
        }
        let copied = self.entries(&copy).await?;
        self.books.found(kind, &copy, Reported::Done, usize::from(copied == entries));
        Some(copy)
    }

    /// Deletes the sessions that nobody else deletes: those in which tools of other agents ran, and those of
    /// a batch's items. Returns their number.
    pub async fn delete_all(&self) -> Result<usize> {
        let mut deleted = 0;
        for agent in [AGENT, CALLEE] {
            loop {
                let path = format!("/v1/agents/{agent}/sessions");
                let list = self.ask(|http, url| http.get(format!("{url}{path}?limit=500"))).await;
                let sessions = list.body["data"].as_array().cloned().unwrap_or_default();
                let ids: Vec<&str> = sessions.iter().filter_map(|session| session["id"].as_str()).collect();
                if ids.is_empty() {
                    break;
                }
                for id in ids {
                    let answer = self.ask(|http, url| http.delete(format!("{url}{path}/{id}"))).await;
                    if !matches!(answer.status, 204 | 404) {
                        bail!("deleting session {id} of {agent}: {} {}", answer.status, answer.body);
                    }
                    deleted += 1;
                }
            }
        }
        Ok(deleted)
    }

    async fn delete(&self, session: &str) {
        let answer = self.ask(|http, url| http.delete(format!("{url}{}", path(session)))).await;
        // If there was no event for the session, it was never created.
        if !matches!(answer.status, 204 | 404) {
            self.trouble(format!("delete {session}: {} {}", answer.status, answer.body));
        }
        let gone = self.ask(|http, url| http.get(format!("{url}{}", path(session)))).await;
        let is_event_session = session.starts_with("e-");
        // An event in flight may create that session again.
        if !is_event_session {
            self.books.found("delete", session, Reported::Done, usize::from(gone.status == 404));
        }
    }

    /// Returns the list in a session's state.
    async fn entries(&self, session: &str) -> Option<Vec<String>> {
        let messages = format!("{}/messages", path(session));
        let answer = self
            .ask(|http, url| http.post(format!("{url}{messages}")).json(&json!({"text": "entries"})))
            .await;
        match serde_json::from_value(answer.body["data"].clone()) {
            Ok(entries) if answer.status == 200 => Some(entries),
            _ => {
                let (Value::Object(_) | Value::String(_)) = &answer.body else { return None };
                self.trouble(format!("entries of {session}: {} {}", answer.status, answer.body));
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ledger_reports_lost_doubled_unknown_and_misordered_entries() {
        let mut ledger = Ledger::new("s".to_owned());
        for (id, reported) in [("a", Reported::Done), ("b", Reported::Unsure), ("c", Reported::Interrupted)] {
            ledger.enter(id, &reported);
        }
        ledger.enter("failed", &Reported::Failed("x".to_owned()));
        let compare = |entries: &[&str]| {
            let entries: Vec<String> = entries.iter().map(|entry| (*entry).to_owned()).collect();
            let (found, strange) = ledger.compare(&entries);
            let found: Vec<usize> = found.into_iter().map(|(_, times)| times).collect();
            (found, strange, ledger.is_in_order(&entries))
        };
        assert_eq!(compare(&["a", "c"]), (vec![1, 1], vec![], true));
        assert_eq!(compare(&["a", "b", "c"]), (vec![1, 1], vec![], true));
        assert_eq!(compare(&["a", "b", "b"]), (vec![1, 2, 0], vec![], true));
        assert_eq!(compare(&["c", "a", "failed"]), (vec![1, 1], vec!["failed".to_owned()], false));
    }
}
