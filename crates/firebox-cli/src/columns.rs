//! Tables without lines, for terminals and for tools that split at spaces.

use comfy_table::{CellAlignment, Table, presets};

/// Rows below a header, if there is one; columns of `numbers` end at the right. No cell steers the terminal.
pub fn table<const N: usize>(
    header: Option<[&str; N]>,
    numbers: &[usize],
    rows: impl IntoIterator<Item = [String; N]>,
) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    if let Some(header) = header {
        table.set_header(header.map(printable));
    }
    table.add_rows(rows.into_iter().map(|row| row.map(|cell| printable(&cell))));
    if let Some(first) = table.column_mut(0) {
        first.set_padding((0, 1));
    }
    for &column in numbers {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.trim_fmt()
}

/// Keeps what a file says from steering the terminal.
pub fn printable(text: &str) -> String {
    let escape = |letter: char| match letter {
        '\n' => letter.to_string(),
        letter if letter.is_control() => letter.escape_debug().to_string(),
        letter => letter.to_string(),
    };
    text.chars().map(escape).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_names_stay_names() {
        let rows = [["a\x1b[31m".to_owned(), "1".to_owned()], ["b".to_owned(), "100".to_owned()]];
        let text = table(Some(["name", "n"]), &[1], rows);
        assert_eq!(text, "name           n\na\\u{1b}[31m    1\nb            100");
        assert_eq!(table(Some(["\x1b[2J"]), &[], [["a".to_owned()]]), "\\u{1b}[2J\na");
    }
}
