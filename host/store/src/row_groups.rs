//! Groups of rows that fit into one statement.

/// Maximum number of rows per statement: few enough that it takes a millisecond or two and stays below
/// SQLite's limit on parameters.
pub(crate) const ROWS_AT_ONCE: usize = 500;
/// Maximum number of bytes per statement, if the rows are large.
pub(crate) const BYTES_AT_ONCE: usize = 1 << 20;

/// Splits rows into groups of which each fits into one statement.
pub(crate) fn bounded<T>(rows: &[T], bytes: impl Fn(&T) -> usize) -> impl Iterator<Item = &[T]> {
    let mut left = rows;
    std::iter::from_fn(move || {
        let mut sum = 0;
        let fits = |row: &&T| {
            sum += bytes(row);
            sum <= BYTES_AT_ONCE
        };
        let count = left.iter().take(ROWS_AT_ONCE).take_while(fits).count();
        // A row that is larger than the limit forms its own group.
        let (rows, rest) = left.split_at(count.max(1).min(left.len()));
        left = rest;
        (!rows.is_empty()).then_some(rows)
    })
}
