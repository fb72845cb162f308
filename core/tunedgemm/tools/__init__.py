"""Services of the core for plugins, in three menus: `launching`, `files` and `tables`."""
