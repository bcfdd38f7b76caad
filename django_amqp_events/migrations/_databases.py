"""What the tables need on each kind of database, for the first migration."""

from typing import Any

#: utf8mb4_bin pads with blanks: "a" equals "a ", and "a\n" sorts before "a", so that a search for
#: values that begin with "a" misses it.
MARIADB, MYSQL = "utf8mb4_nopad_bin", "utf8mb4_0900_bin"


def collate(_apps: Any, schema_editor: Any) -> None:
    """Let MySQL and MariaDB store all of Unicode in the next tables, and compare byte by byte.

    Event ids, queues and handlers are then equal where RabbitMQ and the other databases say so.
    """
    connection = schema_editor.connection
    if connection.vendor == "mysql":
        collation = MARIADB if connection.mysql_is_mariadb else MYSQL
        schema_editor.sql_create_table += f" CHARACTER SET utf8mb4 COLLATE {collation}"
