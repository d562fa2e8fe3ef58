//! The steps from one version of the schema to the next.
//!
//! A step never changes after its release; a new version appends one. SQLite's `user_version` is the number
//! of steps taken.

pub(crate) const STEPS: &[&str] = &[
    "
    CREATE TABLE components (
        digest TEXT PRIMARY KEY,
        bytes  BLOB NOT NULL
    );
    CREATE TABLE agents (
        name           TEXT PRIMARY KEY,
        manifest       TEXT NOT NULL,
        digest         TEXT NOT NULL REFERENCES components(digest),
        deployed_at_ms INTEGER NOT NULL
    );
    CREATE TABLE sessions (
        agent         TEXT NOT NULL REFERENCES agents(name) ON DELETE CASCADE,
        session       TEXT NOT NULL,
        turns         INTEGER NOT NULL,
        created_at_ms INTEGER NOT NULL,
        updated_at_ms INTEGER NOT NULL,
        PRIMARY KEY (agent, session)
    ) WITHOUT ROWID;
    CREATE TABLE state (
        agent   TEXT NOT NULL,
        session TEXT NOT NULL,
        key     TEXT NOT NULL,
        value   BLOB NOT NULL,
        PRIMARY KEY (agent, session, key),
        FOREIGN KEY (agent, session) REFERENCES sessions(agent, session) ON DELETE CASCADE
    );
    CREATE TABLE conversations (
        agent   TEXT NOT NULL,
        session TEXT NOT NULL,
        name    TEXT NOT NULL,
        body    BLOB NOT NULL,
        PRIMARY KEY (agent, session, name),
        FOREIGN KEY (agent, session) REFERENCES sessions(agent, session) ON DELETE CASCADE
    );
    CREATE TABLE outcomes (
        agent           TEXT NOT NULL,
        session         TEXT NOT NULL,
        idempotency_key TEXT NOT NULL,
        turn            INTEGER NOT NULL,
        body            BLOB NOT NULL,
        PRIMARY KEY (agent, session, idempotency_key),
        FOREIGN KEY (agent, session) REFERENCES sessions(agent, session) ON DELETE CASCADE
    );
    CREATE TABLE logs (
        id      INTEGER PRIMARY KEY AUTOINCREMENT,
        agent   TEXT NOT NULL REFERENCES agents(name) ON DELETE CASCADE,
        session TEXT NOT NULL,
        turn    INTEGER NOT NULL,
        at_ms   INTEGER NOT NULL,
        level   TEXT NOT NULL,
        message TEXT NOT NULL
    );
    CREATE INDEX logs_by_agent ON logs (agent, id);
",
    "
    CREATE TABLE artifacts (
        key        TEXT PRIMARY KEY,
        checksum   TEXT NOT NULL,
        bytes      INTEGER NOT NULL,
        used_at_ms INTEGER NOT NULL
    ) WITHOUT ROWID;
",
    "
    CREATE TABLE deployments (
        agent          TEXT NOT NULL REFERENCES agents(name) ON DELETE CASCADE,
        version        INTEGER NOT NULL,
        manifest       TEXT NOT NULL,
        digest         TEXT NOT NULL REFERENCES components(digest),
        deployed_at_ms INTEGER NOT NULL,
        deployed_by    TEXT NOT NULL,
        PRIMARY KEY (agent, version)
    ) WITHOUT ROWID;
    CREATE INDEX deployments_by_digest ON deployments (digest);
    INSERT INTO deployments SELECT name, 1, manifest, digest, deployed_at_ms, 'local' FROM agents;
    CREATE TABLE agents_in_force (
        name    TEXT PRIMARY KEY,
        version INTEGER NOT NULL
    );
    INSERT INTO agents_in_force SELECT name, 1 FROM agents;
    DROP TABLE agents;
    ALTER TABLE agents_in_force RENAME TO agents;
",
    "
    CREATE TABLE turns (
        key             INTEGER PRIMARY KEY AUTOINCREMENT,
        id              TEXT NOT NULL,
        agent           TEXT NOT NULL REFERENCES agents(name) ON DELETE CASCADE,
        session         TEXT NOT NULL,
        idempotency_key TEXT,
        digest          TEXT NOT NULL,
        input           BLOB NOT NULL,
        seed            BLOB NOT NULL,
        accepted_at_ms  INTEGER NOT NULL,
        state           INTEGER NOT NULL,
        number          INTEGER,
        result          BLOB,
        ended_at_ms     INTEGER
    );
    CREATE INDEX turns_by_session ON turns (agent, session, key);
    CREATE INDEX turns_open ON turns (key) WHERE ended_at_ms IS NULL;
    CREATE INDEX turns_ended ON turns (ended_at_ms) WHERE ended_at_ms IS NOT NULL;
    CREATE UNIQUE INDEX turns_by_idempotency_key ON turns (agent, session, idempotency_key)
        WHERE idempotency_key IS NOT NULL;
    CREATE TABLE turn_records (
        turn     INTEGER NOT NULL REFERENCES turns(key) ON DELETE CASCADE,
        position INTEGER NOT NULL,
        call     INTEGER NOT NULL,
        shown    INTEGER NOT NULL,
        body     BLOB NOT NULL,
        PRIMARY KEY (turn, position)
    ) WITHOUT ROWID;
",
    "
    CREATE TABLE schedules (
        key       INTEGER PRIMARY KEY AUTOINCREMENT,
        id        TEXT NOT NULL UNIQUE,
        agent     TEXT NOT NULL REFERENCES agents(name) ON DELETE CASCADE,
        session   TEXT NOT NULL,
        name      TEXT NOT NULL,
        target    TEXT NOT NULL,
        principal TEXT NOT NULL,
        timing    TEXT NOT NULL,
        repeats   INTEGER NOT NULL,
        data      BLOB,
        tries     INTEGER NOT NULL,
        state     INTEGER NOT NULL,
        due_ms    INTEGER NOT NULL,
        missed    INTEGER NOT NULL,
        attempt   INTEGER NOT NULL,
        wake_ms   INTEGER NOT NULL,
        error     TEXT,
        UNIQUE (agent, session, name)
    );
    CREATE INDEX schedules_waiting ON schedules (wake_ms) WHERE state = 0;
    CREATE INDEX schedules_begun ON schedules (agent, target) WHERE state IN (1, 2);
    CREATE TABLE events (
        key             INTEGER PRIMARY KEY AUTOINCREMENT,
        source          TEXT NOT NULL,
        id              TEXT NOT NULL,
        topic           TEXT NOT NULL,
        data            BLOB,
        principal       TEXT NOT NULL,
        hops            INTEGER NOT NULL,
        at_ms           INTEGER NOT NULL,
        published_at_ms INTEGER NOT NULL,
        UNIQUE (source, id)
    );
    CREATE INDEX events_by_age ON events (published_at_ms);
    CREATE TABLE webhooks (
        id            TEXT PRIMARY KEY,
        url           TEXT NOT NULL,
        topics        TEXT NOT NULL,
        secret        TEXT NOT NULL,
        configured    INTEGER NOT NULL,
        created_at_ms INTEGER NOT NULL,
        disabled      TEXT
    ) WITHOUT ROWID;
    CREATE TABLE deliveries (
        key     INTEGER PRIMARY KEY AUTOINCREMENT,
        event   INTEGER NOT NULL REFERENCES events(key) ON DELETE CASCADE,
        agent   TEXT REFERENCES agents(name) ON DELETE CASCADE,
        session TEXT,
        webhook TEXT REFERENCES webhooks(id) ON DELETE CASCADE,
        state   INTEGER NOT NULL,
        attempt INTEGER NOT NULL,
        wake_ms INTEGER NOT NULL,
        error   TEXT
    );
    CREATE INDEX deliveries_by_event ON deliveries (event);
    CREATE INDEX deliveries_by_session ON deliveries (agent, session);
    CREATE INDEX deliveries_by_webhook ON deliveries (webhook) WHERE webhook IS NOT NULL;
    CREATE INDEX deliveries_waiting ON deliveries (wake_ms) WHERE state = 0;
    CREATE INDEX deliveries_begun ON deliveries (agent, session, webhook) WHERE state = 1;
    CREATE INDEX deliveries_dead ON deliveries (key) WHERE state = 2;
",
    "
    CREATE TABLE batches (
        key           INTEGER PRIMARY KEY AUTOINCREMENT,
        id            TEXT NOT NULL UNIQUE,
        principal     TEXT NOT NULL,
        model         TEXT NOT NULL,
        bytes         INTEGER NOT NULL,
        running       INTEGER NOT NULL,
        cancelled     INTEGER NOT NULL,
        created_at_ms INTEGER NOT NULL,
        started_at_ms INTEGER,
        ended_at_ms   INTEGER
    );
    CREATE INDEX batches_open ON batches (running, key) WHERE ended_at_ms IS NULL;
    CREATE INDEX batches_ended ON batches (ended_at_ms) WHERE ended_at_ms IS NOT NULL;
    CREATE TABLE batch_items (
        batch     INTEGER NOT NULL REFERENCES batches(key) ON DELETE CASCADE,
        position  INTEGER NOT NULL,
        reference TEXT,
        request   BLOB NOT NULL,
        state     INTEGER NOT NULL,
        failures  INTEGER NOT NULL,
        losses    INTEGER NOT NULL,
        wake_ms   INTEGER NOT NULL,
        result    BLOB,
        UNIQUE (batch, position)
    );
    CREATE INDEX batch_items_waiting ON batch_items (batch, position) WHERE state = 0;
    CREATE INDEX batch_items_running ON batch_items (batch) WHERE state = 1;
    CREATE TABLE approvals (
        id            TEXT PRIMARY KEY,
        turn          INTEGER NOT NULL REFERENCES turns(key) ON DELETE CASCADE,
        tool          TEXT NOT NULL,
        arguments     TEXT NOT NULL,
        created_at_ms INTEGER NOT NULL,
        expires_at_ms INTEGER NOT NULL,
        verdict       INTEGER,
        reason        TEXT,
        decided_by    TEXT,
        decided_at_ms INTEGER
    ) WITHOUT ROWID;
    CREATE INDEX approvals_by_turn ON approvals (turn);
    CREATE INDEX approvals_pending ON approvals (created_at_ms) WHERE verdict IS NULL;
",
    "
    CREATE TABLE secrets (
        agent         TEXT NOT NULL,
        name          TEXT NOT NULL,
        hosts         TEXT NOT NULL,
        sealed        BLOB NOT NULL,
        updated_at_ms INTEGER NOT NULL,
        PRIMARY KEY (agent, name)
    ) WITHOUT ROWID;
",
    "
    CREATE TABLE api_keys (
        id            TEXT PRIMARY KEY,
        digest        BLOB NOT NULL UNIQUE CHECK (length(digest) = 32),
        tenant        TEXT NOT NULL,
        role          TEXT NOT NULL,
        agents        TEXT,
        name          TEXT NOT NULL,
        created_at_ms INTEGER NOT NULL,
        expires_at_ms INTEGER,
        revoked_at_ms INTEGER,
        last_used_day INTEGER
    ) WITHOUT ROWID;
",
    // Keys have their own rate limits.
    "
    ALTER TABLE api_keys ADD COLUMN requests_per_minute INTEGER CHECK (requests_per_minute > 0);
",
    "
    CREATE TABLE token_use (
        day    INTEGER NOT NULL,
        tenant TEXT NOT NULL,
        agent  TEXT NOT NULL,
        tokens INTEGER NOT NULL,
        PRIMARY KEY (day, tenant, agent)
    ) WITHOUT ROWID;
",
    // A process that holds the keys in memory reads one number to find out whether they have changed. The
    // time of a key's last use does not count as a change.
    "
    CREATE TABLE api_key_changes (changes INTEGER NOT NULL);
    INSERT INTO api_key_changes VALUES (1);
    CREATE TRIGGER api_key_made AFTER INSERT ON api_keys
        BEGIN UPDATE api_key_changes SET changes = changes + 1; END;
    CREATE TRIGGER api_key_changed AFTER UPDATE OF id, digest, tenant, role, agents, name, created_at_ms, expires_at_ms,
        revoked_at_ms, requests_per_minute ON api_keys
        BEGIN UPDATE api_key_changes SET changes = changes + 1; END;
    CREATE TRIGGER api_key_deleted AFTER DELETE ON api_keys
        BEGIN UPDATE api_key_changes SET changes = changes + 1; END;
",
    // Sessions have keys, so that their rows can be written and removed in chunks while they are invisible:
    // only the row of the session itself determines whether the session exists. A session without a name is
    // an incomplete copy, or the rest of a deleted session.
    "
    CREATE TABLE sessions_with_keys (
        key           INTEGER PRIMARY KEY AUTOINCREMENT,
        agent         TEXT NOT NULL REFERENCES agents(name) ON DELETE CASCADE,
        session       TEXT,
        turns         INTEGER NOT NULL,
        created_at_ms INTEGER NOT NULL,
        updated_at_ms INTEGER NOT NULL,
        UNIQUE (agent, session)
    );
    INSERT INTO sessions_with_keys (agent, session, turns, created_at_ms, updated_at_ms)
        SELECT agent, session, turns, created_at_ms, updated_at_ms FROM sessions;
    CREATE TABLE state_of_keys (
        session INTEGER NOT NULL REFERENCES sessions(key) ON DELETE CASCADE,
        key     TEXT NOT NULL,
        value   BLOB NOT NULL,
        PRIMARY KEY (session, key)
    ) WITHOUT ROWID;
    INSERT INTO state_of_keys SELECT s.key, state.key, value FROM state JOIN sessions_with_keys AS s USING (agent, session);
    CREATE TABLE conversations_of_keys (
        session INTEGER NOT NULL REFERENCES sessions(key) ON DELETE CASCADE,
        name    TEXT NOT NULL,
        body    BLOB NOT NULL,
        PRIMARY KEY (session, name)
    );
    INSERT INTO conversations_of_keys SELECT s.key, name, body
        FROM conversations JOIN sessions_with_keys AS s USING (agent, session);
    CREATE TABLE outcomes_of_keys (
        session         INTEGER NOT NULL REFERENCES sessions(key) ON DELETE CASCADE,
        idempotency_key TEXT NOT NULL,
        turn            INTEGER NOT NULL,
        body            BLOB NOT NULL,
        PRIMARY KEY (session, idempotency_key)
    );
    INSERT INTO outcomes_of_keys SELECT s.key, idempotency_key, turn, body
        FROM outcomes JOIN sessions_with_keys AS s USING (agent, session);
    DROP TABLE outcomes;
    DROP TABLE conversations;
    DROP TABLE state;
    DROP TABLE sessions;
    ALTER TABLE sessions_with_keys RENAME TO sessions;
    ALTER TABLE state_of_keys RENAME TO state;
    ALTER TABLE conversations_of_keys RENAME TO conversations;
    ALTER TABLE outcomes_of_keys RENAME TO outcomes;
    CREATE INDEX sessions_unnamed ON sessions (key) WHERE session IS NULL;

    -- Deletions that were begun. Rows with larger keys came after, and stay.
    CREATE TABLE erasures (
        key      INTEGER PRIMARY KEY AUTOINCREMENT,
        agent    TEXT NOT NULL,
        session  TEXT NOT NULL,
        schedule INTEGER NOT NULL,
        delivery INTEGER NOT NULL,
        turn     INTEGER NOT NULL,
        log      INTEGER NOT NULL
    );
    ALTER TABLE agents ADD COLUMN deleted INTEGER NOT NULL DEFAULT FALSE;
    ALTER TABLE batches ADD COLUMN complete INTEGER NOT NULL DEFAULT TRUE;
    -- What is written to see whether anything can be.
    CREATE TABLE checks (
        id     INTEGER PRIMARY KEY,
        at     INTEGER NOT NULL,
        filler BLOB NOT NULL
    );
",
    // The outcome of the last attempt of a webhook.
    "
    ALTER TABLE webhooks ADD COLUMN tried_at_ms INTEGER;
    ALTER TABLE webhooks ADD COLUMN last_status INTEGER;
    ALTER TABLE webhooks ADD COLUMN last_error TEXT;
",
    // The number of times that the process died during a turn without progress since the last time, the
    // journal's position at that time, and whether the current or last process was running the turn.
    "
    ALTER TABLE turns ADD COLUMN runs INTEGER NOT NULL DEFAULT TRUE;
    ALTER TABLE turns ADD COLUMN losses INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE turns ADD COLUMN lost_at INTEGER NOT NULL DEFAULT -1;
    CREATE TABLE ended_in_order (at_ms INTEGER NOT NULL);
",
    // The model that produced a conversation's tokens, so that a host whose models changed can tell which
    // sessions are affected. It is written with the conversation; existing conversations are not read to fill
    // it in.
    "
    ALTER TABLE conversations ADD COLUMN model TEXT;
    ALTER TABLE conversations ADD COLUMN digest TEXT;
    CREATE INDEX conversations_by_model ON conversations (model, digest, session);
",
    // The time at which a host last recorded its clock, and the times of day that were skipped because the
    // clock was set forward.
    "
    CREATE TABLE clock (seen_ms INTEGER NOT NULL);
    CREATE TABLE clock_skips (from_ms INTEGER PRIMARY KEY, to_ms INTEGER NOT NULL);
",
    // The time at which an idempotency key was answered, so that it can be removed; and an index of the log
    // lines of each tenant's sessions.
    "
    ALTER TABLE outcomes ADD COLUMN at_ms INTEGER NOT NULL DEFAULT 0;
    CREATE INDEX outcomes_by_age ON outcomes (at_ms);
    CREATE INDEX deliveries_open ON deliveries (event) WHERE state IN (0, 1);
    CREATE INDEX logs_by_folder ON logs (agent, substr(session, 1, instr(session, '/')), id);
",
    // Work that a restored database holds back until the operator decides. Deliveries and schedules use
    // states for this.
    "
    ALTER TABLE turns ADD COLUMN held INTEGER NOT NULL DEFAULT FALSE;
    ALTER TABLE batches ADD COLUMN held INTEGER NOT NULL DEFAULT FALSE;
    ALTER TABLE deliveries ADD COLUMN restored INTEGER NOT NULL DEFAULT FALSE;
    CREATE TABLE restores (
        key          INTEGER PRIMARY KEY AUTOINCREMENT,
        backup_at_ms INTEGER NOT NULL,
        at_ms        INTEGER NOT NULL
    );
    CREATE INDEX turns_held ON turns (key) WHERE held;
    CREATE INDEX batches_held ON batches (key) WHERE held;
    CREATE INDEX deliveries_held ON deliveries (key) WHERE state = 3;
    CREATE INDEX schedules_held ON schedules (key) WHERE state IN (4, 5);
",
    // The event at which the last search for old events stopped, so that dead letters are not checked again
    // each time.
    "
    CREATE TABLE event_pruning (after_key INTEGER NOT NULL);
    INSERT INTO event_pruning (after_key) VALUES (0);
    DROP INDEX events_by_age;
",
    // The use of models. Texts are empty where a row has no key, agent or session.
    "
    CREATE TABLE usage (
        day                INTEGER NOT NULL,
        tenant             TEXT NOT NULL,
        key                TEXT NOT NULL,
        agent              TEXT NOT NULL,
        session            TEXT NOT NULL,
        model              TEXT NOT NULL,
        requests           INTEGER NOT NULL,
        input              INTEGER NOT NULL,
        cached             INTEGER NOT NULL,
        output             INTEGER NOT NULL,
        estimated_requests INTEGER NOT NULL,
        estimated_input    INTEGER NOT NULL,
        estimated_output   INTEGER NOT NULL,
        PRIMARY KEY (day, tenant, key, agent, session, model)
    ) WITHOUT ROWID;
    CREATE INDEX usage_by_tenant ON usage (tenant, day);
    CREATE INDEX usage_by_session ON usage (agent, session) WHERE session != '';
    CREATE INDEX usage_of_sessions ON usage (day) WHERE session != '';
",
    // The log of requests to models, and the keys that may read what was said. Deletions of sessions remove the
    // requests before them.
    "
    CREATE TABLE requests (
        key     INTEGER PRIMARY KEY AUTOINCREMENT,
        id      TEXT NOT NULL UNIQUE,
        at_ms   INTEGER NOT NULL,
        tenant  TEXT NOT NULL,
        api_key TEXT,
        agent   TEXT,
        session TEXT,
        asked   TEXT NOT NULL,
        model   TEXT NOT NULL,
        status  TEXT NOT NULL,
        error   TEXT,
        details TEXT NOT NULL,
        bytes   INTEGER NOT NULL
    );
    CREATE INDEX requests_by_tenant ON requests (tenant, key, bytes);
    CREATE INDEX requests_by_session ON requests (agent, session) WHERE agent IS NOT NULL;
    CREATE INDEX requests_by_age ON requests (at_ms);
    CREATE TABLE request_bodies (
        request INTEGER PRIMARY KEY REFERENCES requests(key) ON DELETE CASCADE,
        body    TEXT NOT NULL
    );
    ALTER TABLE erasures ADD COLUMN request INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE api_keys ADD COLUMN bodies INTEGER NOT NULL DEFAULT FALSE;
",
    include_str!("sqlite/responses.sql"),
    // The details of a batch in its client's API, the time at which it ends unfinished, files of clients, in parts, and timelines of turns.
    "
    ALTER TABLE turns ADD COLUMN timeline BLOB;
    ALTER TABLE batches ADD COLUMN details TEXT;
    ALTER TABLE batches ADD COLUMN expires_at_ms INTEGER;
    ALTER TABLE batches ADD COLUMN expired INTEGER NOT NULL DEFAULT FALSE;
    CREATE INDEX batches_by_expiry ON batches (expires_at_ms) WHERE expires_at_ms IS NOT NULL AND ended_at_ms IS NULL;
    CREATE INDEX batches_with_details ON batches (principal, key) WHERE details IS NOT NULL;
    CREATE TABLE files (
        key           INTEGER PRIMARY KEY AUTOINCREMENT,
        id            TEXT NOT NULL UNIQUE,
        principal     TEXT NOT NULL,
        name          TEXT NOT NULL,
        purpose       TEXT NOT NULL,
        bytes         INTEGER NOT NULL,
        at_ms         INTEGER NOT NULL,
        expires_at_ms INTEGER NOT NULL,
        complete      INTEGER NOT NULL
    );
    CREATE INDEX files_by_principal ON files (principal, key);
    CREATE INDEX files_by_expiry ON files (expires_at_ms);
    CREATE TABLE file_parts (
        file     INTEGER NOT NULL REFERENCES files(key) ON DELETE CASCADE,
        position INTEGER NOT NULL,
        body     BLOB NOT NULL,
        PRIMARY KEY (file, position)
    );
",
    // The time for which an ended batch is kept, unless it is that of all batches.
    "ALTER TABLE batches ADD COLUMN keep_ms INTEGER;",
    include_str!("sqlite/hosts.sql"),
    // Tokens of prompts that another server wrote to its cache.
    "ALTER TABLE usage ADD COLUMN cache_write INTEGER NOT NULL DEFAULT 0;",
    include_str!("sqlite/cluster.sql"),
    include_str!("sqlite/page_erasures.sql"),
    include_str!("sqlite/host_versions.sql"),
    // The waiting deliveries of each target, in their order.
    "CREATE INDEX deliveries_by_target ON deliveries (agent, session, webhook, wake_ms, key) WHERE state = 0;",
    include_str!("sqlite/outcome_messages.sql"),
];
