//! `skep:agent/schedule`: schedules that wake the session.
//!
//! A turn sees the schedules as they were when it first asked, overlaid with its own changes. The schedules that it saw and
//! the time are in its journal, so that a replayed turn sets the same schedules.

use crate::{
    Clock, ScheduleTiming,
    bindings::schedule::{Calendar, Entry, Host, Options, ScheduleError, Timing},
    capability::TurnContext,
    journal::{Identity, Journal, Stopped},
    schedule::ScheduleRequest,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use skep_store::{ScheduleChange, ScheduleRow, ScheduleState, Store};
use std::{collections::BTreeMap, sync::Arc};

/// Maximum size of all schedules of a session together, in their journaled form.
const MAX_SESSION_BYTES: usize = 1 << 20;
/// Maximum size of the schedules in one record of the journal. A record may have twice as much, and a single schedule is
/// smaller than this.
const MAX_PAGE_BYTES: usize = 1 << 20;

/// The schedules of a turn's session, read when the turn first asks for them.
pub(crate) struct ScheduleView {
    pub(crate) store: Store,
    pub(crate) clock: Clock,
    pub(crate) owner: Owner,
    pub(crate) seen: Option<Seen>,
}

/// The owner of the schedules.
pub(crate) struct Owner {
    pub(crate) agent: String,
    pub(crate) session: String,
    pub(crate) principal: String,
    pub(crate) turn_id: String,
    /// Maximum number of schedules of the session.
    pub(crate) limit: u32,
    /// Whether the agent exports an alarm handler.
    pub(crate) takes_alarms: bool,
}

/// The schedules as the turn sees them, and its changes.
pub(crate) struct Seen {
    now_ms: u64,
    /// Schedules by name.
    entries: BTreeMap<String, Entry>,
    changes: Vec<ScheduleChange>,
    made: u32,
}

/// A journal record of schedules that were read.
#[derive(Serialize, Deserialize)]
struct Read {
    now_ms: u64,
    entries: Vec<Entry>,
    /// Whether another record follows.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    has_more: bool,
}

type Done = wasmtime::Result<Result<(), ScheduleError>>;

impl Host for TurnContext {
    async fn after(&mut self, name: String, delay_ms: u64, options: Options) -> Done {
        self.set_schedule(&name, &options, |now_ms| ScheduleTiming::after(now_ms, delay_ms)).await
    }

    async fn at(&mut self, name: String, time_ms: u64, options: Options) -> Done {
        self.set_schedule(&name, &options, |now_ms| ScheduleTiming::at(now_ms, time_ms)).await
    }

    async fn every(&mut self, name: String, interval_ms: u64, options: Options) -> Done {
        self.set_schedule(&name, &options, |_| ScheduleTiming::every(interval_ms)).await
    }

    async fn cron(&mut self, name: String, when: Calendar, options: Options) -> Done {
        self.set_schedule(&name, &options, |_| ScheduleTiming::cron(&when.expression, &when.time_zone)).await
    }

    async fn cancel(&mut self, name: String) -> wasmtime::Result<bool> {
        self.charge(name.len())?;
        let Some((_, seen)) = self.seen_schedules().await? else { return Ok(false) };
        Ok(seen.cancel(&name))
    }

    async fn list(&mut self) -> wasmtime::Result<Vec<Entry>> {
        self.charge(0)?;
        let Some((_, seen)) = self.seen_schedules().await? else { return Ok(Vec::new()) };
        let entries: Vec<Entry> = seen.entries.values().cloned().collect();
        let bytes = entries.iter().map(|entry| entry.name.len() + entry.data.as_ref().map_or(0, String::len));
        self.charge_result(bytes.sum())?;
        Ok(entries)
    }
}

impl TurnContext {
    async fn set_schedule(
        &mut self,
        name: &str,
        options: &Options,
        timing: impl FnOnce(u64) -> Result<ScheduleTiming, String>,
    ) -> Done {
        self.charge(name.len() + options.data.as_ref().map_or(0, String::len))?;
        let Some((owner, seen)) = self.seen_schedules().await? else {
            let message = "schedules can be set only in a turn, not while the agent describes itself";
            return Ok(Err(ScheduleError::Denied(message.to_owned())));
        };
        Ok(seen.set(owner, name, options, timing))
    }

    /// Returns the schedules, after reading them if necessary. Returns `None` while the agent describes itself.
    async fn seen_schedules(&mut self) -> wasmtime::Result<Option<(&Owner, &mut Seen)>> {
        let (Some(turn), Some(view)) = (&self.turn, &mut self.schedules) else { return Ok(None) };
        let seen = match view.seen.take() {
            Some(seen) => seen,
            None => view.read(&turn.journal).await?,
        };
        Ok(Some((&view.owner, view.seen.insert(seen))))
    }
}

impl ScheduleView {
    /// Returns the turn's changes, in order.
    pub(crate) fn into_changes(self) -> Vec<ScheduleChange> {
        self.seen.map(|seen| seen.changes).unwrap_or_default()
    }

    /// Reads the schedules in as many records as necessary, because the size of a record is bounded.
    async fn read(&self, journal: &Arc<Journal>) -> Result<Seen, Stopped> {
        let mut seen = Seen { now_ms: 0, entries: BTreeMap::new(), changes: Vec::new(), made: 0 };
        let mut page = 0_u32;
        loop {
            let identity = match page {
                0 => Identity::new("schedule.read", &()),
                page => Identity::new("schedule.read", &page),
            };
            let mut call = journal.call(identity)?;
            let read: Read = match journal.recorded(&mut call)? {
                Some((read, _place)) => read,
                None => {
                    let last = seen.entries.last_key_value().map(|(name, _)| name.as_str());
                    let read = self.read_page(journal, last).await?;
                    journal.ended(&call, &read, Vec::new());
                    read
                }
            };
            if page == 0 {
                seen.now_ms = read.now_ms;
            }
            seen.entries.extend(read.entries.into_iter().map(|entry| (entry.name.clone(), entry)));
            if !read.has_more {
                return Ok(seen);
            }
            page += 1;
        }
    }

    /// Reads the schedules after this name, as many as one record holds.
    async fn read_page(&self, journal: &Journal, after: Option<&str>) -> Result<Read, Stopped> {
        let rows = match self.store.schedules_of(&self.owner.agent, &self.owner.session).await {
            Ok(rows) => rows,
            Err(error) => {
                journal.fail(error.into());
                return Err(Stopped);
            }
        };
        let (mut entries, mut bytes) = (Vec::new(), 0);
        let left =
            rows.into_iter().filter(|row| after.is_none_or(|after| row.schedule.name.as_str() > after));
        for entry in left.filter_map(entry) {
            bytes += journaled_bytes(&entry);
            if bytes > MAX_PAGE_BYTES && !entries.is_empty() {
                return Ok(Read { now_ms: self.clock.now_ms(), entries, has_more: true });
            }
            entries.push(entry);
        }
        Ok(Read { now_ms: self.clock.now_ms(), entries, has_more: false })
    }
}

impl Seen {
    fn set(
        &mut self,
        owner: &Owner,
        name: &str,
        options: &Options,
        timing: impl FnOnce(u64) -> Result<ScheduleTiming, String>,
    ) -> Result<(), ScheduleError> {
        if !owner.takes_alarms {
            let message =
                "the agent does not export skep:agent/alarm-handler, so it cannot be woken by a schedule";
            return Err(ScheduleError::Denied(message.to_owned()));
        }
        let invalid = ScheduleError::InvalidArgument;
        let parse = |data: &String| serde_json::from_str::<Value>(data);
        let data = options.data.as_ref().map(parse).transpose();
        let data = data.map_err(|error| invalid(format!("the data is not JSON: {error}")))?;
        let timing = timing(self.now_ms).map_err(invalid)?;
        if !self.entries.contains_key(name) && self.entries.len() >= owner.limit as usize {
            return Err(ScheduleError::QuotaExceeded(format!(
                "the session has {} schedules, which is its limit; cancel one, or raise `schedules` under [limits] in \
                 agent.toml, up to the operator's ceiling in skep.toml",
                self.entries.len()
            )));
        }
        let wanted = ScheduleRequest {
            name,
            target: &owner.session,
            principal: &owner.principal,
            timing: timing.clone(),
            data: data.as_ref(),
            tries: options.tries,
        };
        // It replaces the schedule of the same name.
        let others =
            self.entries.values().filter(|entry| entry.name != name).map(journaled_bytes).sum::<usize>();
        let bytes = others + options.data.as_deref().map_or(0, escaped_bytes) + name.len();
        if bytes > MAX_SESSION_BYTES {
            return Err(ScheduleError::QuotaExceeded(format!(
                "the schedules of the session would have {bytes} bytes together; at most {MAX_SESSION_BYTES} are allowed; \
                 keep large data in the state"
            )));
        }
        self.made += 1;
        let id = format!("{}-{}", owner.turn_id, self.made);
        let row = wanted.prepare(id.clone(), self.now_ms).map_err(invalid)?;
        let entry = Entry {
            id,
            name: name.to_owned(),
            timing: timing.into(),
            data: options.data.clone(),
            due_at_ms: row.due_ms,
            failed: None,
        };
        self.entries.insert(name.to_owned(), entry);
        self.changes.push(ScheduleChange::Set(row));
        Ok(())
    }

    fn cancel(&mut self, name: &str) -> bool {
        let was_there = self.entries.remove(name).is_some();
        if was_there {
            self.changes.push(ScheduleChange::Cancel(name.to_owned()));
        }
        was_there
    }
}

/// Returns an upper bound for the size of a schedule in a record.
fn journaled_bytes(entry: &Entry) -> usize {
    /// Size of identifiers, times and field names.
    const OTHER_BYTES: usize = 512;
    let texts = [Some(&entry.name), entry.data.as_ref(), entry.failed.as_ref()].into_iter().flatten();
    OTHER_BYTES + texts.map(|text| escaped_bytes(text)).sum::<usize>()
}

/// Returns the size of a text as a JSON string, without quotes.
fn escaped_bytes(text: &str) -> usize {
    let escape = |byte: u8| match byte {
        b'"' | b'\\' | b'\n' | b'\r' | b'\t' => 2,
        0..=0x1f => 6,
        _ => 1,
    };
    text.bytes().map(escape).sum()
}

/// Converts a row to the guest's form. Returns `None` for a row that a later version wrote and this one cannot read.
fn entry(row: ScheduleRow) -> Option<Entry> {
    let ScheduleRow { schedule, state, error, .. } = row;
    Some(Entry {
        timing: ScheduleTiming::decode(&schedule.timing).ok()?.into(),
        id: schedule.id,
        name: schedule.name,
        data: schedule.data.and_then(|data| String::from_utf8(data).ok()),
        due_at_ms: schedule.due_ms,
        failed: error.filter(|_| state == ScheduleState::Failed),
    })
}

impl From<ScheduleTiming> for Timing {
    fn from(timing: ScheduleTiming) -> Self {
        match timing {
            ScheduleTiming::At(at_ms) => Timing::At(at_ms),
            ScheduleTiming::Every(interval_ms) => Timing::Every(interval_ms),
            ScheduleTiming::Cron { expression, time_zone } => {
                Timing::Cron(Calendar { expression, time_zone })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::feed::Feed;
    use crate::journal::tests::{first_turn, put_agent};
    use skep_store::{MAX_RECORD_BYTES, NewSchedule};

    fn owner(limit: u32, takes_alarms: bool) -> Owner {
        Owner {
            agent: "a".into(),
            session: "s".into(),
            principal: "p".into(),
            turn_id: "t".into(),
            limit,
            takes_alarms,
        }
    }

    fn seen() -> Seen {
        Seen { now_ms: 1_000_000, entries: BTreeMap::new(), changes: Vec::new(), made: 0 }
    }

    fn every_minute(_now_ms: u64) -> Result<ScheduleTiming, String> {
        ScheduleTiming::every(60_000)
    }

    const PLAIN: Options = Options { data: None, tries: None };

    #[test]
    fn a_turn_sees_its_own_schedules_and_keeps_its_changes_in_order() {
        let (owner, mut seen) = (owner(2, true), seen());
        seen.set(&owner, "a", &PLAIN, every_minute).expect("the first");
        seen.set(&owner, "a", &PLAIN, every_minute).expect("replaces the schedule");
        seen.set(&owner, "b", &PLAIN, every_minute).expect("the second");
        assert!(seen.cancel("a"));
        assert!(!seen.cancel("a"));
        assert_eq!(seen.entries.keys().collect::<Vec<_>>(), ["b"]);
        assert_eq!(seen.entries["b"].due_at_ms, 1_060_000);
        let ids: Vec<&str> = seen
            .changes
            .iter()
            .map(|change| match change {
                ScheduleChange::Set(row) => row.id.as_str(),
                ScheduleChange::Cancel(name) => name.as_str(),
            })
            .collect();
        assert_eq!(ids, ["t-1", "t-2", "t-3", "a"]);
    }

    #[test]
    fn the_number_of_schedules_is_bounded_and_replacing_one_is_free() {
        let (owner, mut seen) = (owner(1, true), seen());
        seen.set(&owner, "a", &PLAIN, every_minute).expect("the first");
        seen.set(&owner, "a", &PLAIN, every_minute).expect("replaces the schedule");
        let refused = seen.set(&owner, "b", &PLAIN, every_minute).expect_err("the second");
        assert!(
            matches!(&refused, ScheduleError::QuotaExceeded(why) if why.contains("`schedules` under [limits]"))
        );
    }

    #[test]
    fn an_invalid_schedule_is_refused_with_a_reason() {
        let mut seen = seen();
        let data = Options { data: Some("{".into()), ..PLAIN };
        let refused = seen.set(&owner(1, true), "a", &data, every_minute).expect_err("not JSON");
        assert!(matches!(&refused, ScheduleError::InvalidArgument(why) if why.contains("not JSON")));
        let short = |_now_ms| ScheduleTiming::every(10);
        let refused = seen.set(&owner(1, true), "a", &PLAIN, short).expect_err("too often");
        assert!(matches!(&refused, ScheduleError::InvalidArgument(why) if why.contains("may be 1000 to")));
        let refused = seen.set(&owner(1, false), "a", &PLAIN, every_minute).expect_err("no alarm handler");
        assert!(matches!(&refused, ScheduleError::Denied(why) if why.contains("alarm-handler")));
        assert!(seen.changes.is_empty());
    }
    #[test]
    fn the_bytes_of_all_schedules_of_a_session_are_bounded() {
        let (owner, mut seen) = (owner(100, true), seen());
        let large = Options { data: Some(format!("{:?}", "x".repeat(250_000))), ..PLAIN };
        for name in ["a", "b", "c", "d"] {
            seen.set(&owner, name, &large, every_minute).expect("a million bytes in all");
        }
        let refused = seen.set(&owner, "e", &large, every_minute).expect_err("more than that");
        assert!(matches!(&refused, ScheduleError::QuotaExceeded(why) if why.contains("1048576 are allowed")));
        seen.set(&owner, "d", &large, every_minute).expect("replaces the schedule");
        assert!(seen.cancel("a"));
        seen.set(&owner, "e", &large, every_minute).expect("cancelling freed space");
        // The journaled form is counted, including escapes.
        let quotes = Options { data: Some(format!("[{}]", vec!["\"\""; 60_000].join(","))), ..PLAIN };
        assert!(seen.cancel("b"));
        assert!(seen.set(&owner, "b", &quotes, every_minute).is_err());
    }

    /// Returns schedules owned by the manifest, whose session name is empty.
    fn many(count: u32, bytes: usize) -> Vec<NewSchedule> {
        let row = |number| NewSchedule {
            id: format!("id-{number}"),
            name: format!("name-{number:05}"),
            target: "s".into(),
            principal: "p".into(),
            timing: ScheduleTiming::At(2_000_000).encode(),
            repeats: false,
            data: Some(format!("{:?}", "\u{e9}".repeat(bytes / 2)).into_bytes()),
            tries: 6,
            due_ms: 2_000_000,
        };
        (0..count).map(row).collect()
    }

    #[tokio::test]
    async fn schedules_that_exceed_one_record_are_split_and_replayed_from_the_journal() {
        let store = Store::for_tests().await.expect("a database");
        put_agent(&store, &many(30, 200_000)).await;
        let key = first_turn(&store).await;
        let view = ScheduleView {
            store: store.clone(),
            clock: Clock::at(1_000_000),
            owner: Owner { session: String::new(), ..owner(100, true) },
            seen: None,
        };
        let read = async || {
            let records = store.records(key).await.expect("read");
            let journal = Journal::open(
                store.clone(),
                Clock::default(),
                key,
                vec![1; 32],
                Feed::new("t".into()),
                records,
            );
            let journal = journal.expect("readable");
            let seen = view
                .read(&journal)
                .await
                .unwrap_or_else(|_stopped| panic!("the journal accepts the records"));
            journal.close().await.expect("each record is within its bound");
            (seen.now_ms, seen.entries.into_keys().collect::<Vec<_>>())
        };
        let live = read().await;
        assert_eq!((live.0, live.1.len()), (1_000_000, 30));
        let records = store.records(key).await.expect("read");
        assert!(records.len() >= 6 && records.iter().all(|record| record.body.len() <= MAX_RECORD_BYTES));
        put_agent(&store, &[]).await;
        view.clock.advance(5_000);
        assert_eq!(read().await, live, "the replay sees the journaled schedules");
    }
}
