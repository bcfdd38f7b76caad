import pymysql

# Django's backend imports mysqlclient, which has no wheels for Linux.
pymysql.install_as_MySQLdb()
