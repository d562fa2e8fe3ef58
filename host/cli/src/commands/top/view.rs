//! The screen: curves of the chosen model, with their last values.

use ratatui::Frame;
use ratatui::crossterm::event::{KeyCode, KeyEvent};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize as _};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Gauge, Paragraph, Sparkline};
use skep_api::ModelFigures;

use super::history::History;

/// Number of seconds that the curves can show.
pub(super) const SECONDS: usize = 600;
/// A curve has whole numbers, so values are multiplied by this.
const SCALE: f64 = 100.0;
const ACCENT: Color = Color::Cyan;
/// Width below which panels are stacked.
const NARROW: u16 = 72;

/// The state of the screen beside the figures.
pub(super) struct Screen {
    url: String,
    selected: usize,
    pub(super) connection: Connection,
}

/// Whether the host answers.
pub(super) enum Connection {
    Live,
    /// The host is asked again and again.
    Lost(String),
}

/// A panel: its title, its values with their unit, and the column of its curve.
struct Panel {
    title: &'static str,
    values: &'static [(&'static str, &'static str)],
    unit: &'static str,
    curve: &'static str,
}

const PANELS: [Panel; 6] = [
    Panel {
        title: "Tokens per second",
        values: &[
            ("generated", "generated_tokens_s"),
            ("prompt", "prompt_tokens_s"),
            ("cached", "cached_tokens_s"),
        ],
        unit: "",
        curve: "generated_tokens_s",
    },
    Panel {
        title: "Sequences",
        values: &[("running", "running"), ("waiting", "waiting"), ("per step", "batch_sequences")],
        unit: "",
        curve: "running",
    },
    Panel {
        title: "Time to first token",
        values: &[
            ("p50", "first_token_ms_p50"),
            ("p90", "first_token_ms_p90"),
            ("p99", "first_token_ms_p99"),
        ],
        unit: " ms",
        curve: "first_token_ms_p90",
    },
    Panel {
        title: "Time between tokens",
        values: &[
            ("p50", "inter_token_ms_p50"),
            ("p90", "inter_token_ms_p90"),
            ("p99", "inter_token_ms_p99"),
        ],
        unit: " ms",
        curve: "inter_token_ms_p90",
    },
    Panel {
        title: "Time of a step",
        values: &[("p50", "step_ms_p50"), ("p99", "step_ms_p99")],
        unit: " ms",
        curve: "step_ms_p50",
    },
    Panel {
        title: "Time in the queue",
        values: &[("p50", "queue_ms_p50"), ("p99", "queue_ms_p99")],
        unit: " ms",
        curve: "queue_ms_p99",
    },
];

impl Screen {
    /// Creates a screen that shows the first model.
    pub(super) fn new(url: String) -> Self {
        Screen { url, selected: 0, connection: Connection::Live }
    }

    /// Chooses the model that a key asks for.
    pub(super) fn select(&mut self, key: &KeyEvent, models: usize) {
        let models = models.max(1);
        match key.code {
            KeyCode::Right | KeyCode::Tab => self.selected = (self.selected + 1) % models,
            KeyCode::Left | KeyCode::BackTab => self.selected = (self.selected + models - 1) % models,
            _ => {}
        }
    }
}

/// Draws the figures of the chosen model.
pub(super) fn draw(frame: &mut Frame<'_>, history: &History, screen: &Screen) {
    let models = history.models();
    let selected = screen.selected.min(models.len().saturating_sub(1));
    let [top, body, shares, bottom] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Min(0),
        Constraint::Length(3),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    let Some(model) = models.get(selected) else {
        let text = "no model is loaded; the first request or `skep model load NAME` loads one";
        frame.render_widget(Line::from(format!("skep top  {}", screen.url)).bold(), top);
        frame.render_widget(Paragraph::new(text), body);
        frame.render_widget(footer(screen, 0, history.at_ms()), bottom);
        return;
    };
    frame.render_widget(header(screen, model, (selected, models.len())), top);
    for (panel, area) in PANELS.iter().zip(panel_areas(body)) {
        draw_panel(frame, area, panel, model);
    }
    draw_shares(frame, shares, model);
    frame.render_widget(footer(screen, models.len(), history.at_ms()), bottom);
}

fn header(screen: &Screen, model: &ModelFigures, (selected, models): (usize, usize)) -> Line<'static> {
    let place = if models > 1 { format!(" ({} of {models})", selected + 1) } else { String::new() };
    let device = if model.device.is_empty() { String::new() } else { format!(" on {}", model.device) };
    Line::from(vec![
        Span::from("skep top  ").bold(),
        Span::from(model.name.clone()).fg(ACCENT).bold(),
        Span::from(format!("{device}{place}  ")),
        Span::from(screen.url.clone()).dim(),
    ])
}

fn footer(screen: &Screen, models: usize, at_ms: u64) -> Line<'static> {
    let keys = if models > 1 { "q quit  ←→ model  " } else { "q quit  " };
    let state = match &screen.connection {
        Connection::Live if at_ms == 0 => Span::from("waiting for the first figures").dim(),
        Connection::Live => Span::from("live").fg(Color::Green),
        Connection::Lost(why) => Span::from(format!("reconnecting: {why}")).fg(Color::Red),
    };
    Line::from(vec![Span::from(keys).dim(), state])
}

/// Returns the areas of the panels: two in a row, or one on a narrow screen.
fn panel_areas(body: Rect) -> Vec<Rect> {
    if body.width < NARROW {
        let rows = Layout::vertical([Constraint::Fill(1); PANELS.len()]).split(body);
        return rows.to_vec();
    }
    let rows = Layout::vertical([Constraint::Fill(1); PANELS.len() / 2]).split(body);
    let cells = rows.iter().flat_map(|row| Layout::horizontal([Constraint::Fill(1); 2]).split(*row).to_vec());
    cells.collect()
}

fn draw_panel(frame: &mut Frame<'_>, area: Rect, panel: &Panel, model: &ModelFigures) {
    let block = Block::bordered().border_style(Style::new().dim()).title(panel.title);
    let inner = block.inner(area);
    frame.render_widget(block, area);
    let [values, curve] = Layout::vertical([Constraint::Length(1), Constraint::Min(0)]).areas(inner);
    let spans = panel.values.iter().flat_map(|(label, column)| {
        [
            Span::from(format!("{label} ")).dim(),
            Span::from(last(model, column, panel.unit)).bold(),
            Span::from("  "),
        ]
    });
    frame.render_widget(Line::from_iter(spans), values);
    let points = model.columns.get(panel.curve).map(Vec::as_slice).unwrap_or_default();
    let shown = &points[points.len().saturating_sub(curve.width.into())..];
    let data = shown.iter().map(|value| (value.unwrap_or_default() * SCALE).max(0.0) as u64);
    frame.render_widget(Sparkline::default().data(data).style(Style::new().fg(ACCENT)), curve);
}

fn draw_shares(frame: &mut Frame<'_>, area: Rect, model: &ModelFigures) {
    let [cache, pages] = Layout::horizontal([Constraint::Fill(1); 2]).areas(area);
    let hit = recent(model, "cache_hit").unwrap_or_default();
    draw_share(frame, cache, "Prompt tokens from the cache", hit, format!("{:.1} %", hit * 100.0));
    let [used, cached, total] =
        ["pages_used", "pages_cached", "pages_total"].map(|column| recent(model, column).unwrap_or_default());
    let share = if total > 0.0 { used / total } else { 0.0 };
    let text = format!("{used} in use, {cached} cached of {total}");
    draw_share(frame, pages, "KV pages", share, text);
}

fn draw_share(frame: &mut Frame<'_>, area: Rect, title: &'static str, share: f64, text: String) {
    let block = Block::bordered().border_style(Style::new().dim()).title(title);
    let gauge = Gauge::default().block(block).gauge_style(Style::new().fg(ACCENT));
    frame.render_widget(gauge.ratio(share.clamp(0.0, 1.0)).label(text), area);
}

/// Returns the last value of a column that something happened in.
fn recent(model: &ModelFigures, column: &str) -> Option<f64> {
    model.columns.get(column)?.iter().rev().find_map(|value| *value)
}

fn last(model: &ModelFigures, column: &str, unit: &str) -> String {
    let value = model.columns.get(column).and_then(|values| values.last().copied().flatten());
    match value {
        None => "–".to_owned(),
        Some(value) if value >= 100.0 => format!("{value:.0}{unit}"),
        Some(value) => format!("{}{unit}", (value * 10.0).round() / 10.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::{Terminal, backend::TestBackend};
    use serde_json::json;

    fn history(models: &[&str]) -> History {
        let model = |name: &&str| {
            json!({"name": name, "device": "cpu", "replicas": 1, "context_length": 8192, "page_tokens": 16,
                   "memory": [], "columns": {
                       "generated_tokens_s": [0.0, 50.0, 117.4], "prompt_tokens_s": [0.0, 0.0, 2048.0],
                       "running": [0.0, 2.0, 4.0], "waiting": [0.0, 0.0, 1.0], "cache_hit": [null, 0.953, null],
                       "pages_used": [0.0, 10.0, 512.0], "pages_cached": [0.0, 5.0, 700.0],
                       "pages_total": [2048.0, 2048.0, 2048.0], "step_ms_p50": [null, 3.584, 3.61]}})
        };
        let models: Vec<_> = models.iter().map(model).collect();
        let figures = json!({"object": "engine", "interval_ms": 1000, "at_ms": [1, 2, 3], "models": models});
        History::new(serde_json::from_value(figures).expect("figures"))
    }

    /// Returns the lines of the screen at this size.
    fn drawn(history: &History, screen: &Screen, (width, height): (u16, u16)) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("a terminal");
        terminal.draw(|frame| draw(frame, history, screen)).expect("drawn");
        let buffer = terminal.backend().buffer().clone();
        let cells: Vec<&str> = buffer.content().iter().map(|cell| cell.symbol()).collect();
        cells.chunks(width.into()).map(|row| row.concat()).collect()
    }

    fn screen() -> Screen {
        Screen::new("http://127.0.0.1:8080".to_owned())
    }

    #[test]
    fn the_screen_has_the_last_values_curves_and_shares() {
        let lines = drawn(&history(&["small"]), &screen(), (100, 30));
        let text = lines.join("\n");
        assert!(lines[0].starts_with("skep top  small on cpu  http://127.0.0.1:8080"), "{text}");
        for shown in [
            "generated 117  prompt 2048  cached –",
            "running 4  waiting 1  per step –",
            "p50 3.6 ms  p99 –",
            "95.3 %",
            "512 in use, 700 cached of 2048",
        ] {
            assert!(text.contains(shown), "{shown}:\n{text}");
        }
        assert!(text.contains('█'), "a curve:\n{text}");
        assert!(lines[29].starts_with("q quit  live"), "{text}");
    }

    #[test]
    fn arrow_keys_select_a_model_and_a_lost_host_is_shown() {
        let (history, mut screen) = (history(&["small", "large"]), screen());
        screen.select(&KeyEvent::from(KeyCode::Right), 2);
        assert!(drawn(&history, &screen, (80, 24))[0].contains("large on cpu (2 of 2)"));
        screen.select(&KeyEvent::from(KeyCode::Right), 2);
        screen.select(&KeyEvent::from(KeyCode::Left), 2);
        assert!(drawn(&history, &screen, (80, 24))[0].contains("large"));
        screen.connection = Connection::Lost("no host answers".to_owned());
        assert!(drawn(&history, &screen, (80, 24))[23].contains("reconnecting: no host answers"));
    }

    #[test]
    fn small_screens_and_hosts_without_models_are_drawn() {
        for size in [(30, 20), (10, 3), (1, 1)] {
            drawn(&history(&["small"]), &screen(), size);
        }
        let text = drawn(&history(&[]), &screen(), (80, 10)).join("\n");
        assert!(text.contains("no model is loaded"), "{text}");
    }
}
