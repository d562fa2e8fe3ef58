//! Checks the text of all statements for what only SQLite runs: a column that is neither grouped nor aggregated beside an
//! aggregate. SQLite returns it from any row; PostgreSQL refuses the statement.
//!
//! The check reads the string literals of this crate, so it finds a statement that no test runs, and needs no server. Parts that are
//! formatted into a statement count as names of columns, and subqueries are checked by themselves.

use std::{collections::BTreeSet, fs, path::Path};

/// Functions of one argument that make one value of many rows. `MIN` and `MAX` of several arguments are functions of one row.
const AGGREGATES: [&str; 9] =
    ["COUNT", "SUM", "MIN", "MAX", "AVG", "TOTAL", "STRING_AGG", "GROUP_CONCAT", "ARRAY_AGG"];
/// Words that end a list of columns, or what follows it.
const CLAUSES: [&str; 12] = [
    "FROM",
    "WHERE",
    "GROUP",
    "HAVING",
    "ORDER",
    "LIMIT",
    "OFFSET",
    "RETURNING",
    "ON",
    "FOR",
    "WINDOW",
    "SET",
];
/// Words in an expression that are no columns.
const WORDS: [&str; 27] = [
    "DISTINCT", "ALL", "CASE", "WHEN", "THEN", "ELSE", "END", "NULL", "TRUE", "FALSE", "AND", "OR", "NOT",
    "IS", "IN", "BETWEEN", "LIKE", "ESCAPE", "EXISTS", "FROM", "ASC", "DESC", "NULLS", "FIRST", "LAST",
    "COLLATE", "INTERVAL",
];

/// The part of statements that sums columns of `usage`.
const SUMS: &str = "{SUMS}";
/// The part of statements that is the number of the host.
const HOST: &str = "{host}";
/// The end of a statement that groups by the primary key of the row that it reads, whose columns have one value in each group.
const BY_PRIMARY_KEY: &str = "FROM batches LEFT JOIN batch_items ON batch = key WHERE key = ? GROUP BY key";

#[derive(Clone, Debug, PartialEq)]
enum Token {
    /// A word, or a part that is formatted into the statement.
    Word(String),
    Sign(char),
    /// A literal or a parameter.
    Value,
}

impl Token {
    fn is(&self, keyword: &str) -> bool {
        matches!(self, Token::Word(word) if word.eq_ignore_ascii_case(keyword))
    }

    fn is_one_of(&self, keywords: &[&str]) -> bool {
        keywords.iter().any(|keyword| self.is(keyword))
    }
}

fn tokens(sql: &str) -> Vec<Token> {
    let characters: Vec<char> = sql.chars().collect();
    let (mut tokens, mut at) = (Vec::new(), 0);
    let end_of = |from: usize, is_part: &dyn Fn(char) -> bool| {
        (from..characters.len()).find(|index| !is_part(characters[*index])).unwrap_or(characters.len())
    };
    while let Some(&first) = characters.get(at) {
        let closing = match first {
            '\'' | '"' => Some(first),
            '{' => Some('}'),
            _ => None,
        };
        let end = if let Some(closing) = closing {
            (end_of(at + 1, &|character| character != closing) + 1).min(characters.len())
        } else if first == '?' || first == '$' || first.is_ascii_digit() {
            end_of(at + 1, &|character| character.is_ascii_digit())
        } else if first.is_alphabetic() || first == '_' {
            end_of(at, &|character| character.is_alphanumeric() || character == '_')
        } else {
            at + 1
        };
        let text: String = characters[at..end].iter().collect();
        match first {
            _ if first.is_whitespace() => {}
            '\'' | '?' | '$' => tokens.push(Token::Value),
            '"' | '{' => tokens.push(Token::Word(text)),
            _ if first.is_ascii_digit() => tokens.push(Token::Value),
            _ if first.is_alphabetic() || first == '_' => tokens.push(Token::Word(text)),
            sign => tokens.push(Token::Sign(sign)),
        }
        at = end;
    }
    tokens
}

/// Returns the position behind the bracket that closes the one at `open`.
fn behind(tokens: &[Token], open: usize) -> usize {
    let mut depth = 0;
    for (at, token) in tokens.iter().enumerate().skip(open) {
        match token {
            Token::Sign('(') => depth += 1,
            Token::Sign(')') => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at + 1;
        }
    }
    tokens.len()
}

/// Splits at commas outside of brackets.
fn items(tokens: &[Token]) -> Vec<&[Token]> {
    let (mut items, mut begin, mut at) = (Vec::new(), 0, 0);
    while at < tokens.len() {
        match tokens[at] {
            Token::Sign('(') => at = behind(tokens, at),
            Token::Sign(',') => {
                items.push(&tokens[begin..at]);
                at += 1;
                begin = at;
            }
            _ => at += 1,
        }
    }
    items.push(&tokens[begin..]);
    items
}

/// The columns of an expression outside of aggregates and subqueries, and whether it has an aggregate.
#[derive(Default)]
struct Found {
    columns: BTreeSet<String>,
    has_aggregate: bool,
}

impl Found {
    fn of(tokens: &[Token]) -> Found {
        let mut found = Found::default();
        found.look(tokens);
        found
    }

    fn look(&mut self, tokens: &[Token]) {
        let mut at = 0;
        while at < tokens.len() {
            let next = tokens.get(at + 1);
            match &tokens[at] {
                // The next token is the name of a result or of a type.
                Token::Word(word) if word.eq_ignore_ascii_case("AS") => at += 2,
                Token::Sign(':') if next == Some(&Token::Sign(':')) => at += 3,
                Token::Sign('(') => {
                    let end = behind(tokens, at);
                    self.look_inside(&tokens[at + 1..end.max(at + 2) - 1]);
                    at = end;
                }
                Token::Word(_) if next == Some(&Token::Sign('.')) => at += 2,
                word @ Token::Word(_) if next == Some(&Token::Sign('(')) => {
                    let end = behind(tokens, at + 1);
                    let inside = &tokens[at + 2..end.max(at + 3) - 1];
                    let is_window = tokens.get(end).is_some_and(|token| token.is("OVER"));
                    let is_of_rows = !word.is_one_of(&["MIN", "MAX"]) || items(inside).len() == 1;
                    if word.is_one_of(&AGGREGATES) && is_of_rows && !is_window {
                        self.has_aggregate = true;
                    } else {
                        self.look_inside(inside);
                    }
                    let has_filter = tokens.get(end).is_some_and(|token| token.is("FILTER"));
                    at = if has_filter { behind(tokens, end + 1) } else { end };
                }
                Token::Word(word) if word == SUMS => {
                    self.has_aggregate = true;
                    at += 1;
                }
                Token::Word(word) if word == HOST => at += 1,
                token @ Token::Word(word) => {
                    if !token.is_one_of(&WORDS) {
                        self.columns.insert(word.to_lowercase());
                    }
                    at += 1;
                }
                Token::Sign(_) | Token::Value => at += 1,
            }
        }
    }

    fn look_inside(&mut self, tokens: &[Token]) {
        if !tokens.first().is_some_and(|token| token.is("SELECT")) {
            self.look(tokens);
        }
    }
}

/// Returns the clause that begins with these keywords.
fn clause<'t>(select: &'t [Token], keyword: &str) -> &'t [Token] {
    let mut at = 0;
    while at < select.len() {
        if select[at].is(keyword) {
            let begin = at + if select[at].is_one_of(&["GROUP", "ORDER"]) { 2 } else { 1 };
            let begin = begin.min(select.len());
            return &select[begin..begin + end_of_clause(&select[begin..])];
        }
        at = if select[at] == Token::Sign('(') { behind(select, at) } else { at + 1 };
    }
    &[]
}

fn end_of_clause(tokens: &[Token]) -> usize {
    let mut at = 0;
    while at < tokens.len() && !tokens[at].is_one_of(&CLAUSES) {
        at = if tokens[at] == Token::Sign('(') { behind(tokens, at) } else { at + 1 };
    }
    at.min(tokens.len())
}

/// Returns the tokens of the query that begins at `begin`, without other queries that follow it.
fn query_at(tokens: &[Token], begin: usize) -> &[Token] {
    let mut at = begin;
    while at < tokens.len() {
        let is_end = matches!(tokens[at], Token::Sign(')' | ';'))
            || tokens[at].is_one_of(&["UNION", "EXCEPT", "INTERSECT"]);
        if is_end {
            return &tokens[begin..at];
        }
        at = if tokens[at] == Token::Sign('(') { behind(tokens, at) } else { at + 1 };
    }
    &tokens[begin..]
}

/// Returns the columns beside aggregates that only SQLite knows a value for.
fn bare_columns(sql: &str) -> BTreeSet<String> {
    let tokens = tokens(sql);
    let selects = tokens.iter().enumerate().filter(|(_, token)| token.is("SELECT"));
    let mut bare = BTreeSet::new();
    for (at, _) in selects {
        let select = query_at(&tokens, at + 1);
        let list = items(&select[..end_of_clause(select)]);
        let (groups, order) = (clause(select, "GROUP"), clause(select, "ORDER"));
        let columns: Vec<Found> = list.iter().map(|item| Found::of(item)).collect();
        let is_grouped = !groups.is_empty();
        if !is_grouped && !columns.iter().any(|found| found.has_aggregate) {
            continue;
        }
        let mut known = Found::of(groups).columns;
        // The position or the name of a result stands for its columns, and an order can name a result.
        let mut names = BTreeSet::new();
        for (place, (item, found)) in list.iter().zip(&columns).enumerate() {
            let name = match item {
                [.., keyword, Token::Word(name)] if keyword.is("AS") => Some(name.to_lowercase()),
                _ => None,
            };
            let is_named = name.as_ref().is_some_and(|name| known.contains(name));
            let has_only_positions = items(groups).iter().all(|group| matches!(group, [Token::Value]));
            let is_first = is_grouped && has_only_positions && place < items(groups).len();
            if is_named || is_first {
                known.extend(found.columns.iter().cloned());
            }
            names.extend(name);
        }
        let having = Found::of(clause(select, "HAVING")).columns;
        let ordered = Found::of(order).columns.into_iter().filter(|column| !names.contains(column));
        let used = columns.into_iter().flat_map(|found| found.columns).chain(having).chain(ordered);
        bare.extend(used.filter(|column| !known.contains(column)));
    }
    bare
}

/// Returns the string literals of a Rust source.
fn literals(source: &str) -> Vec<String> {
    let characters: Vec<char> = source.chars().collect();
    let (mut found, mut at) = (Vec::new(), 0);
    let starts =
        |at: usize, text: &str| text.chars().enumerate().all(|(n, c)| characters.get(at + n) == Some(&c));
    while at < characters.len() {
        if starts(at, "//") {
            at +=
                characters[at..].iter().position(|character| *character == '\n').unwrap_or(characters.len());
        } else if starts(at, "'\"'") || starts(at, "'\\\"'") || starts(at, "'\\''") {
            at += if characters[at + 1] == '"' { 3 } else { 4 };
        } else if starts(at, "r#\"") {
            let begin = at + 3;
            let end = (begin..characters.len()).find(|end| starts(*end, "\"#")).unwrap_or(characters.len());
            found.push(characters[begin..end].iter().collect());
            at = end + 2;
        } else if characters[at] == '"' {
            let mut text = String::new();
            at += 1;
            while at < characters.len() && characters[at] != '"' {
                // An escaped character is white space or a quote, and the same to this check.
                let is_escaped = characters[at] == '\\';
                text.push(if is_escaped { ' ' } else { characters[at] });
                at += if is_escaped { 2 } else { 1 };
            }
            found.push(text);
            at += 1;
        } else {
            at += 1;
        }
    }
    found
}

fn sources(folder: &Path, found: &mut Vec<(String, String)>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if path.is_dir() {
            sources(&path, found);
        } else if name != "statement_tests.rs" {
            found.push((name, fs::read_to_string(&path).unwrap()));
        }
    }
}

#[test]
fn no_statement_reads_a_column_that_is_neither_grouped_nor_aggregated() {
    let mut files = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut files);
    let (mut statements, mut faults) = (0, Vec::new());
    for (name, text) in files {
        let texts = if name.ends_with(".sql") { vec![text] } else { literals(&text) };
        for sql in texts.into_iter().filter(|text| text.contains("SELECT") && !text.contains(BY_PRIMARY_KEY))
        {
            statements += 1;
            let bare = bare_columns(&sql);
            if !bare.is_empty() {
                faults.push(format!("{name}: {bare:?} in {sql}"));
            }
        }
    }
    assert!(statements > 150, "only {statements} statements were found");
    assert!(
        faults.is_empty(),
        "PostgreSQL refuses these columns beside an aggregate:\n{}",
        faults.join("\n")
    );
}

#[test]
fn bare_columns_are_found_wherever_they_are() {
    let cases = [
        ("SELECT a, MAX(b) FROM t", "a"),
        ("SELECT t.a, COUNT(*) FROM t GROUP BY b", "a"),
        ("SELECT a || 'x', SUM(b) + c FROM t GROUP BY a", "c"),
        ("SELECT COALESCE(a, 0), MAX(b) FROM t WHERE c = (SELECT d FROM u)", "a"),
        ("SELECT 1 WHERE EXISTS (SELECT a, COUNT(*) FROM t)", "a"),
        ("INSERT INTO t (a, b) SELECT {column}, MAX(b) FROM u", "{column}"),
        ("SELECT COUNT(*) FROM t ORDER BY a", "a"),
        ("SELECT a, COUNT(*) FROM t GROUP BY a HAVING b > 1", "b"),
        ("SELECT a FROM t UNION ALL SELECT b FROM t GROUP BY c", "b"),
        ("SELECT CAST(a AS BIGINT), MAX(b)::bigint FROM t", "a"),
    ];
    for (sql, column) in cases {
        assert_eq!(bare_columns(sql).into_iter().collect::<Vec<_>>(), [column], "{sql}");
    }
}

#[test]
fn grouped_and_aggregated_columns_are_not_bare() {
    let cases = [
        "SELECT a, b FROM t ORDER BY c",
        "SELECT a, MAX(b) FROM t GROUP BY a ORDER BY a, MAX(c)",
        "SELECT t.a, u.b, COUNT(*) FROM t JOIN u ON t.c = u.c GROUP BY t.a, u.b",
        "SELECT a + 1 AS next, COUNT(*) FROM t GROUP BY next",
        "SELECT a, b, COUNT(*) AS n FROM t GROUP BY 1, 2 ORDER BY n",
        "SELECT {by}, SUM(x) FROM t GROUP BY {by}",
        "SELECT COALESCE(MAX(a), 0) + 1, ?2, 'x', NULL FROM t",
        "SELECT MAX(a, b), c FROM t",
        "SELECT COUNT(*) FILTER (WHERE a = 1), COALESCE(SUM(b) FILTER (WHERE c), 0) FROM t",
        "SELECT a, COUNT(*) OVER () FROM t",
        "SELECT a, (SELECT MAX(b) FROM u) FROM t",
        "SELECT COUNT(*), (SELECT b FROM u WHERE c = 1) FROM t WHERE d IN (SELECT e FROM v)",
        "UPDATE t SET a = (SELECT MAX(b) FROM u WHERE u.c = t.c) WHERE d = 1 RETURNING a",
    ];
    for sql in cases {
        assert_eq!(bare_columns(sql), BTreeSet::new(), "{sql}");
    }
}
