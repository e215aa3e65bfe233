"""The dashboards as code: what is asked (`queries`), how it is shown (`panels`), and one module per dashboard."""
