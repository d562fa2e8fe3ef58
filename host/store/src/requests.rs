//! The log of requests to models: what was asked of which model, how it ended, and what was said.
//!
//! It is a log and not the accounting, which `usage` counts: its writes are outside of the commits of turns, and its oldest
//! rows are removed when it is full. Bodies are in a table of their own, so that rows without them are read quickly.

use crate::{
    Store, StoreError,
    sql::{Connection, Dialect, QueryBuilder, Row, query, query_as, query_scalar},
};

/// Maximum number of rows and of bytes that one write adds, so that other writes do not wait long.
const WRITE_ROWS: usize = 32;
const WRITE_BYTES: usize = 256 << 10;
/// Number of rows that one statement removes.
const CHUNK_ROWS: i64 = 100;
/// Number of rows that one statement searches for a text.
const SEARCHED_ROWS: i64 = 2_000;
/// Number of these statements for one page.
const SEARCHES: usize = 5;
/// Bytes of bodies after which a page ends.
const PAGE_BYTES: usize = 8 << 20;
/// Size of a row in the table and its indexes, besides its prompt and answer.
const ROW_BYTES: usize = 200;

/// One request to a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestRow {
    /// The position in the log, which grows with each row. It is set when the row is stored.
    pub key: i64,
    pub id: String,
    pub at_ms: u64,
    pub tenant: String,
    /// Id of the key that sent the request.
    pub api_key: Option<String>,
    /// The agent and its session; `None` for a request that named a model directly.
    pub agent: Option<String>,
    pub session: Option<String>,
    /// The model that was asked for, and the one that answered.
    pub asked: String,
    pub model: String,
    pub status: String,
    /// Code of the error.
    pub error: Option<String>,
    /// Everything else, in the runtime's encoding.
    pub details: String,
    pub body: RequestBody,
}

/// The stored messages of a request and its answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum RequestBody {
    #[default]
    None,
    /// There is one, and it was not read.
    Unread,
    Text(String),
}

/// A selection of requests; `default` selects all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestFilter {
    pub tenant: Option<String>,
    pub api_key: Option<String>,
    pub agent: Option<String>,
    pub session: Option<String>,
    /// Selects requests that asked for this model, or that it answered.
    pub model: Option<String>,
    pub status: Option<String>,
    pub error: Option<String>,
    /// Selects requests of this time or later.
    pub since_ms: Option<u64>,
    /// Selects requests before this time.
    pub until_ms: Option<u64>,
    /// Selects requests whose stored body contains this text. Letters of ASCII match in either case.
    pub text: Option<String>,
}

/// The direction and the start of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestRange {
    /// The newest rows first, from before this position.
    Before(i64),
    /// The oldest rows first, from after this position.
    After(i64),
}

/// A page of requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestPage {
    pub rows: Vec<RequestRow>,
    /// The range of the next page, unless there is nothing more. A page may end before it has the number of rows that was
    /// asked for.
    pub next: Option<RequestRange>,
}

impl RequestRow {
    /// Returns the number of bytes that the row counts for.
    pub fn bytes(&self) -> usize {
        let body = match &self.body {
            RequestBody::Text(text) => text.len(),
            RequestBody::None | RequestBody::Unread => 0,
        };
        let texts = [&self.id, &self.tenant, &self.asked, &self.model, &self.details];
        ROW_BYTES + texts.iter().map(|text| text.len()).sum::<usize>() + body
    }
}

impl RequestRange {
    /// The newest rows.
    pub const NEWEST: RequestRange = RequestRange::Before(i64::MAX);

    fn after_row(self, key: i64) -> RequestRange {
        match self {
            RequestRange::Before(_) => RequestRange::Before(key),
            RequestRange::After(_) => RequestRange::After(key),
        }
    }
}

impl Store {
    /// Adds rows in their order, a few in each transaction.
    pub async fn append_requests(&self, rows: Vec<RequestRow>) -> Result<(), StoreError> {
        let (mut chunk, mut bytes) = (Vec::new(), 0);
        for row in rows {
            bytes += row.bytes();
            chunk.push(row);
            if chunk.len() >= WRITE_ROWS || bytes >= WRITE_BYTES {
                self.append_chunk(std::mem::take(&mut chunk)).await?;
                bytes = 0;
            }
        }
        if chunk.is_empty() { Ok(()) } else { self.append_chunk(chunk).await }
    }

    async fn append_chunk(&self, rows: Vec<RequestRow>) -> Result<(), StoreError> {
        self.write(rows, |connection, rows| Box::pin(insert(connection, rows))).await
    }

    /// Returns at most `limit` rows. With `with_bodies`, a page ends after a few megabytes.
    pub async fn requests(
        &self,
        filter: &RequestFilter,
        range: RequestRange,
        limit: u32,
        with_bodies: bool,
    ) -> Result<RequestPage, StoreError> {
        let mut page = RequestPage { rows: Vec::new(), next: None };
        if filter.text.is_none() {
            self.read(filter, (range, None), limit, with_bodies, &mut page).await?;
            return Ok(page);
        }
        // SQLite finds each of them at an end of the index, but both in one query only by reading all of it.
        let ends = "SELECT COALESCE((SELECT MIN(key) FROM requests), 0), COALESCE((SELECT MAX(key) FROM requests), 0)";
        let (oldest, newest): (i64, i64) = query_as(ends).fetch_one(&self.readers).await.map_err(failed())?;
        let mut range = range;
        for _ in 0..SEARCHES {
            let (from, end) = match range {
                RequestRange::Before(key) => {
                    let from = key.min(newest.saturating_add(1));
                    (RequestRange::Before(from), from.saturating_sub(SEARCHED_ROWS))
                }
                RequestRange::After(key) => {
                    let from = key.max(oldest - 1);
                    (RequestRange::After(from), from.saturating_add(SEARCHED_ROWS))
                }
            };
            let left = limit - page.rows.len() as u32;
            self.read(filter, (from, Some(end)), left, with_bodies, &mut page).await?;
            if page.next.is_some() {
                return Ok(page);
            }
            range = from.after_row(end);
            let is_through = match range {
                RequestRange::Before(key) => key <= oldest,
                RequestRange::After(key) => key >= newest,
            };
            if is_through {
                return Ok(page);
            }
        }
        page.next = Some(range);
        Ok(page)
    }

    /// Adds the rows of a range up to `end`, which is included for a range that goes up and for one that goes down.
    async fn read(
        &self,
        filter: &RequestFilter,
        (range, end): (RequestRange, Option<i64>),
        limit: u32,
        with_bodies: bool,
        page: &mut RequestPage,
    ) -> Result<(), StoreError> {
        let mut select = select();
        match range {
            RequestRange::Before(key) => select.push("r.key < ").push_bind(key),
            RequestRange::After(key) => select.push("r.key > ").push_bind(key),
        };
        match (range, end) {
            (_, None) => {}
            (RequestRange::Before(_), Some(end)) => {
                select.push(" AND r.key >= ").push_bind(end);
            }
            (RequestRange::After(_), Some(end)) => {
                select.push(" AND r.key <= ").push_bind(end);
            }
        }
        filter.push_to(&mut select, self.readers.dialect());
        select.push(match range {
            RequestRange::Before(_) => " ORDER BY r.key DESC LIMIT ",
            RequestRange::After(_) => " ORDER BY r.key LIMIT ",
        });
        // One more shows whether there is a next page.
        select.push_bind(i64::from(limit) + 1);
        let rows = select.build().fetch_all(&self.readers).await.map_err(failed())?;
        let (mut bytes, mut taken) = (0, 0);
        for row in &rows {
            if taken == limit || bytes >= PAGE_BYTES {
                page.next = page.rows.last().map(|last| range.after_row(last.key));
                return Ok(());
            }
            let mut row = request_row(row);
            if with_bodies {
                self.read_body(&mut row).await?;
            }
            bytes += row.bytes();
            taken += 1;
            page.rows.push(row);
        }
        Ok(())
    }

    /// Returns a request with its body.
    pub async fn request(&self, id: &str) -> Result<Option<RequestRow>, StoreError> {
        let mut select = select();
        select.push("r.id = ").push_bind(id);
        let row = select.build().fetch_optional(&self.readers).await.map_err(failed())?;
        let Some(mut row) = row.as_ref().map(request_row) else { return Ok(None) };
        self.read_body(&mut row).await?;
        Ok(Some(row))
    }

    /// Reads the body of a request, if it has one.
    async fn read_body(&self, row: &mut RequestRow) -> Result<(), StoreError> {
        if row.body != RequestBody::Unread {
            return Ok(());
        }
        let body = query_scalar("SELECT body FROM request_bodies WHERE request = ?")
            .bind(row.key)
            .fetch_optional(&self.readers)
            .await
            .map_err(failed())?;
        row.body = body.map_or(RequestBody::None, RequestBody::Text);
        Ok(())
    }

    /// Returns the position of the newest request, or 0 if there is none.
    pub async fn newest_request(&self) -> Result<i64, StoreError> {
        let newest =
            query_scalar("SELECT COALESCE(MAX(key), 0) FROM requests").fetch_one(&self.readers).await;
        newest.map_err(failed())
    }

    /// Returns the number of bytes that each tenant's requests count for.
    pub async fn request_bytes(&self) -> Result<Vec<(String, u64)>, StoreError> {
        let rows = query("SELECT tenant, CAST(SUM(bytes) AS BIGINT) FROM requests GROUP BY tenant")
            .fetch_all(&self.readers)
            .await;
        let rows = rows.map_err(failed())?;
        Ok(rows.iter().map(|row| (row.get(0), row.get::<i64>(1) as u64)).collect())
    }

    /// Removes requests from before this time. Returns their number.
    pub async fn forget_requests(&self, before_ms: u64) -> Result<u64, StoreError> {
        self.in_chunks(before_ms, |connection, before_ms| {
            Box::pin(async move {
                let sql = "DELETE FROM requests WHERE key IN
                     (SELECT key FROM requests WHERE at_ms < ? ORDER BY at_ms LIMIT ?)";
                let gone = query(sql).bind(*before_ms as i64).bind(CHUNK_ROWS).execute(connection).await;
                Ok(gone.map_err(removing())?.rows_affected())
            })
        })
        .await
    }

    /// Removes the oldest requests of a tenant, until they counted for at least `bytes`. Returns the number of bytes.
    pub async fn shrink_requests(&self, tenant: &str, bytes: u64) -> Result<u64, StoreError> {
        let mut gone = 0;
        while gone < bytes {
            let _permit = self.chunked_write_permit().await?;
            let data = (tenant.to_owned(), bytes - gone);
            let work = self.write_common(data, |connection, (tenant, bytes)| {
                Box::pin(remove_oldest(connection, tenant, *bytes))
            });
            match work.await? {
                0 => break,
                removed => gone += removed,
            }
        }
        Ok(gone)
    }
}

impl RequestFilter {
    fn push_to<'q>(&'q self, select: &mut QueryBuilder<'q>, dialect: Dialect) {
        for (column, value) in [
            ("tenant", &self.tenant),
            ("api_key", &self.api_key),
            ("agent", &self.agent),
            ("session", &self.session),
            ("status", &self.status),
            ("error", &self.error),
        ] {
            if let Some(value) = value {
                select.push(format_args!(" AND r.{column} = ")).push_bind(value.clone());
            }
        }
        if let Some(model) = &self.model {
            select.push(" AND (r.model = ").push_bind(model.clone());
            select.push(" OR r.asked = ").push_bind(model.clone()).push(")");
        }
        for (comparison, time) in [(">=", self.since_ms), ("<", self.until_ms)] {
            if let Some(time) = time {
                let time = i64::try_from(time).unwrap_or(i64::MAX);
                select.push(format_args!(" AND r.at_ms {comparison} ")).push_bind(time);
            }
        }
        if let Some(text) = &self.text {
            let escaped = text.replace('\\', "\\\\").replace('%', "\\%").replace('_', "\\_");
            // SQLite ignores the case of ASCII letters.
            let like = dialect.pick(" AND b.body LIKE ", " AND b.body ILIKE ");
            select.push(like).push_bind(format!("%{escaped}%")).push(" ESCAPE '\\'");
        }
    }
}

/// Begins a query whose condition follows.
fn select<'q>() -> QueryBuilder<'q> {
    QueryBuilder::new(
        "SELECT r.key, r.id, r.at_ms, r.tenant, r.api_key, r.agent, r.session, r.asked, r.model, r.status, r.error,
             r.details, b.request IS NOT NULL
         FROM requests AS r LEFT JOIN request_bodies AS b ON b.request = r.key WHERE ",
    )
}

fn request_row(row: &Row) -> RequestRow {
    RequestRow {
        key: row.get(0),
        id: row.get(1),
        at_ms: row.get::<i64>(2) as u64,
        tenant: row.get(3),
        api_key: row.get(4),
        agent: row.get(5),
        session: row.get(6),
        asked: row.get(7),
        model: row.get(8),
        status: row.get(9),
        error: row.get(10),
        details: row.get(11),
        body: if row.get(12) { RequestBody::Unread } else { RequestBody::None },
    }
}

async fn insert(connection: &mut Connection, rows: &[RequestRow]) -> Result<(), StoreError> {
    let failed = || StoreError::while_it("stored the log of requests");
    for row in rows {
        let key: i64 = query_scalar(
            "INSERT INTO requests (id, at_ms, tenant, api_key, agent, session, asked, model, status, error, details, bytes)
             VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING key",
        )
        .bind(&row.id)
        .bind(row.at_ms as i64)
        .bind(&row.tenant)
        .bind(&row.api_key)
        .bind(&row.agent)
        .bind(&row.session)
        .bind(&row.asked)
        .bind(&row.model)
        .bind(&row.status)
        .bind(&row.error)
        .bind(&row.details)
        .bind(row.bytes() as i64)
        .fetch_one(&mut *connection)
        .await
        .map_err(failed())?;
        if let RequestBody::Text(body) = &row.body {
            query("INSERT INTO request_bodies (request, body) VALUES (?, ?)")
                .bind(key)
                .bind(body)
                .execute(&mut *connection)
                .await
                .map_err(failed())?;
        }
    }
    Ok(())
}

/// Removes some of a tenant's oldest requests, of at most about `bytes` bytes. Returns how many bytes.
async fn remove_oldest(connection: &mut Connection, tenant: &str, bytes: u64) -> Result<u64, StoreError> {
    let oldest = query("SELECT key, bytes FROM requests WHERE tenant = ? ORDER BY key LIMIT ?")
        .bind(tenant)
        .bind(CHUNK_ROWS)
        .fetch_all(&mut *connection)
        .await
        .map_err(removing())?;
    let (mut gone, mut last) = (0, 0);
    for row in &oldest {
        if gone >= bytes {
            break;
        }
        last = row.get::<i64>(0);
        gone += row.get::<i64>(1) as u64;
    }
    query("DELETE FROM requests WHERE tenant = ? AND key <= ?")
        .bind(tenant)
        .bind(last)
        .execute(connection)
        .await
        .map_err(removing())?;
    Ok(gone)
}

fn failed() -> impl FnOnce(sqlx::Error) -> StoreError {
    StoreError::while_it("read the log of requests")
}

fn removing() -> impl FnOnce(sqlx::Error) -> StoreError {
    StoreError::while_it("removed old rows of the log of requests")
}
